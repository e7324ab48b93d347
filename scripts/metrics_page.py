"""Writes docs/metrics.md from the tables in the code: `python scripts/metrics_page.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
SOURCES = {"learner": "src/offbook/engine/learner/metrics.py", "trainer": "src/offbook/trainer/sink_publisher.py"}


def tables(source: str) -> list[str]:
    """The Markdown tables of a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / source).read_text(encoding="utf-8"))) or ""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    return ["\n".join(lines) for lines in blocks if lines]


def page() -> str:
    """The whole page."""
    [learner] = tables(SOURCES["learner"])
    step, evaluation = tables(SOURCES["trainer"])
    return f"""# Metrics

This page is for you if you read a run's numbers. It gives you the name and the meaning of every metric.

A **step** is one train request that was applied; it has one or more updates. An **evaluation** measures the model without changing it.

Every trace sink (a service or file that shows a run) uses these names. `a/b, c` means `a/b` and `a/c`.

- **W&B and TensorBoard** put `train/` before the metrics of steps. They put `val/` or `val-sampled/` before those of evaluations.
- **Langfuse** shows a few of them as scores of a [session](langfuse.md#what-you-see). All are in the metadata of the session's first score.

`python scripts/metrics_page.py` generates this page from the code.

## Of a step: the learner

{learner}

[Reading a step](reading_steps.md#reading-the-metrics) says which of them to look at first.

## Of a step: the trainer

{step}

## Of an evaluation

{evaluation}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
