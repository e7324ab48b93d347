"""How long FlexAttention compiles: the first steps of a tree on a fresh model, and those of another length.

    python benchmarks/gpu_flex.py --shape 0.5B --output FOLDER

On a CPU the tree's own attention takes FlexAttention's place, which compiles nothing: a test of this script.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from gpu import Learner
from gpu_cases import SHAPES, WAYS, Group, Way

from offbook.engine.learner.rows.layouts import plan
from offbook.engine.sampling import TargetSettings

if TYPE_CHECKING:
    from offbook.engine.protocol import Sample

STEPS = 3


def seconds(learner: Learner, group: Group, device: torch.device) -> list[float]:
    """Wall time of each of the first steps on a group's tree."""
    rows = cast("list[Sample]", group.rows(learner.base.config.vocab_size))
    ids = np.concatenate([row.completion_ids for row in rows]).astype(np.int64)
    ones = np.ones(len(ids))
    targets = TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), 0 * ones)
    coefficients = torch.ones(len(ids), device=device) / len(ids)
    way = Way("tree", "tree", learner.attention.name)
    made = plan(rows, way.layout, 16_384, learner.shape)
    found: list[float] = []
    for _ in range(STEPS):
        began = time.perf_counter()
        learner.step(made, way, targets, coefficients)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
        learner.gradient()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", choices=sorted(WAYS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    learner = Learner(SHAPES[options.shape], device, dtype)
    size = 40 if device.type == "cpu" else 1000
    lines = [
        f"Attention of the tree: {learner.attention.name}{f' ({reason})' if (reason := learner.attention.reason) else ''}. "
        "Seconds of the first steps.",
        "",
        f"| group | {' | '.join(f'step {number + 1}' for number in range(STEPS))} |",
        "|---" * (STEPS + 1) + "|",
    ]
    for group in (Group("first", size, size // 4, 8), Group("another length", size + 77, size // 4 + 13, 8)):
        times = seconds(learner, group, device)
        lines.append(f"| {group.name} | {' | '.join(f'{each:.2f}' for each in times)} |")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "flex.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
