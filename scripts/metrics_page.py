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

For anyone who reads a run's numbers: every metric of a step and of an evaluation, and its meaning.

Every trace sink shows the metrics of a step and of an evaluation under these names. `a/b, c` stands for `a/b` and `a/c`.
W&B and TensorBoard put `train/` before the metrics of steps, and `val/` or `val-sampled/` before those of evaluations.
Langfuse has a few of them as scores of a [session](langfuse.md#what-you-see), and all in the metadata of its first score.

This page is made from the code: `python scripts/metrics_page.py`.

## Of a step: the learner

{learner}

[Reading a step](reading_steps.md#reading-the-metrics) says which to look at first.

## Of a step: the trainer

{step}

## Of an evaluation

{evaluation}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
