"""Which base fits on which card, and how: python benchmarks/memory_plan.py. Computed, not measured; no GPU is needed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.memory_plan.parts import (
    CALL_TOKENS,
    CUDA_GRAPHS,
    GIB,
    MIN_CALLS,
    BaseShape,
    Workload,
    find_shape,
    parse_card,
    published,
)
from offbook.memory_plan.plan import make_plan, remedy

CARDS = ("16GB", "24GB", "48GB", "80GB")
OPTIONS = {
    "the defaults": Workload(),
    "`--load-in-4bit`": Workload(four_bit=True),
    "`--max-batch 64`": Workload(max_batch=64),
    "`--max-lora-rank 64`": Workload(rank=64),
}
OUT = Path(__file__).parent / "results" / "memory_plan.md"


def cell(base: str, shape: BaseShape, card: str, work: Workload) -> str:
    """Layout, rows and calls; or the setting to change."""
    try:
        plan = make_plan(base, shape, parse_card(card), work)
    except ConfigError:
        return f"no: {remedy(shape, parse_card(card), work)}"
    return f"{plan.layout}, {plan.row_tokens:,}, {plan.cache_calls:,}, {plan.host / GIB:.0f} GiB"


def table(title: str, work: Workload) -> list[str]:
    """One table: a row per base, a column per card."""
    lines = [f"## With {title}", "", f"| base | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for base in published():
        shape = find_shape(base.name)
        cells = [cell(base.name, shape, card, work) for card in CARDS]
        lines.append(f"| {base.name} | {' | '.join(cells)} |")
    return [*lines, ""]


def page() -> str:
    """The whole page."""
    usual = Workload()
    lines = [
        "# Memory plans by card and base",
        "",
        "Written by `python benchmarks/memory_plan.py`. Computed from each base's configuration; nothing here was measured on a "
        f"GPU, and {CUDA_GRAPHS / GIB:.0f} GiB of CUDA graphs, the CUDA contexts and a reserve are assumed. 24GB is 24 x 10^9 bytes.",
        "",
        f"A cell is the memory layout that `auto` chooses, the largest row in tokens (asked: {usual.row_tokens:,}), how many "
        f"calls of {CALL_TOKENS:,} tokens the key-value cache holds (at least {MIN_CALLS}, or `--max-batch`), and the host memory; or `no` and what to change. "
        "[What the layouts are](../../docs/one_gpu.md).",
        "",
    ]
    for title, work in OPTIONS.items():
        lines += table(title, work)
    lines += ["## Where the numbers come from", "", "| base | parameters | configuration |", "|---|---|---|"]
    lines += [f"| {base.name} | {base.parameters:,} | {base.source} |" for base in published()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args(argv).out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
