"""The table of benchmarks/gpu.py: what was measured, as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

PEAKS = (
    ("H200", 989),
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 989),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("T4", 65),
)
"""Dense 16-bit tensor-core peaks, TFLOP/s, from NVIDIA's data sheets; the first name found in the device's name counts."""

INTRODUCTION = """# A learner step on a GPU

    python benchmarks/gpu.py --output FOLDER

{facts}

Forward and backward of one group (LoRA r = 16 on all linear layers, random weights and tokens; 7B with gradient
checkpointing; 16 bits unless the shape says float32), without the optimizer. Seconds are of one step, after a first one
that is not timed (it compiles): median, fastest, and (slowest - fastest) / median as spread.

* *useful tokens*: distinct ones, each shared token once. They are the same for every way of a group, so *useful/s*
  compares them.
* *computed tokens*: what the way computes, without padding. Rows beyond {row_tokens} tokens are split.
* *memory*: the allocator's peak, weights and the reference gradient included.
* *MFU*: model FLOPs / (median seconds x peak). Model FLOPs = computed tokens x (4 x frozen + 6 x LoRA weights)
  + visible query-key pairs x 12 x layers x heads x head size + targets x 4 x vocabulary x hidden size: frozen weights
  have no gradient, a causal square counts half, recomputation does not count. Peak assumed: {peak}.
* *gradient*: the largest relative difference (2-norm, over the adapter's tensors) from call rows of the same shape. In 16 bits
  it is rounding. Leaf rows go through the kernels of call rows, round alike, and so differ less than trees. The check shows
  both: in float32 the mathematics, and in bfloat16 how far each way, call rows too, is from float32's call rows.
* *planned*: what the planner takes on this device.
"""

HEADER = (
    "shape",
    "group",
    "way",
    "planned",
    "useful tokens",
    "computed tokens",
    "median s",
    "fastest s",
    "spread",
    "useful/s",
    "computed/s",
    "memory GiB",
    "MFU",
    "gradient",
    "note",
)


def markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The whole page. `facts` and `rows` are those of gpu.json."""
    peak = facts["peak_tflops"]
    kinds = "; ".join(
        f"{shape}: {choice['name']}" + (f" ({choice['reason']})" if choice["reason"] else "")
        for shape, choice in facts["attention"].items()
    )
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "peft"))
    text = INTRODUCTION.format(
        facts=f"{facts['device']}; {versions}. Attention that the learner chooses for trees: {kinds}.",
        row_tokens=f"{facts['row_tokens']:,}",
        peak=f"{peak:g} TFLOP/s" if peak else "none known, see --peak-tflops",
    )
    lines = [HEADER, ("---",) * len(HEADER), *(_line(row, peak) for row in rows)]
    return text + "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _line(row: dict[str, Any], peak: float | None) -> tuple[str, ...]:
    start = (row["shape"], row["group"], row["way"], "yes" if row["planned"] else "")
    counts = tuple(f"{row[name]:,}" if row[name] else "-" for name in ("useful_tokens", "computed_tokens"))
    difference = row["gradient_difference"]
    gradient = "-" if difference is None else f"{difference:.1e}"
    memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    if not row["seconds"]:
        return (*start, *counts, *("-",) * 5, memory, "-", gradient, row["note"])
    seconds = statistics.median(row["seconds"])
    spread = (max(row["seconds"]) - min(row["seconds"])) / seconds
    times = (f"{seconds:.3f}", f"{min(row['seconds']):.3f}", f"{spread:.0%}" if len(row["seconds"]) > 1 else "-")
    rates = tuple(f"{row[name] / seconds:,.0f}" for name in ("useful_tokens", "computed_tokens"))
    used = f"{row['flops'] / seconds / peak / 1e12:.1%}" if peak and row["flops"] else "-"
    return (*start, *counts, *times, *rates, memory, used, gradient, row["note"])
