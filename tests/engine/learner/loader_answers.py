"""A process of its own, as Unsloth patches transformers for good: what a policy answers under a loader, as tensors.

python -m tests.engine.learner.loader_answers LOADER BASE OUTPUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file

from offbook.base.config import LayoutName
from offbook.engine.learner.model import unsloth_loader

if __name__ == "__main__" and sys.argv[1] == "unsloth":
    unsloth_loader.import_first()

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.rows.layouts import plan
from offbook.engine.protocol import Sample
from offbook.engine.sampling import TargetSettings
from tests.engine.learner.tiny_models import warm

LORA = LoraOptions(r=4, alpha=8, seed=5)


def rows(vocabulary: int) -> list[Sample]:
    """Four calls that branch, of different lengths."""
    draw = np.random.default_rng(3)
    prompt, one, two, more = (draw.integers(0, vocabulary, n).astype(np.int32) for n in (30, 9, 14, 6))
    calls = [(prompt, one), (prompt, two), (np.concatenate([prompt, one, more]), two), (prompt[:20], more)]
    offsets = np.cumsum([0, *(len(completion) for _, completion in calls)])
    return [Sample.bare(p, c, int(offset)) for (p, c), offset in zip(calls, offsets[:-1], strict=True)]


def logprobs(policy: Policy, layout: LayoutName, *, adapter: bool = True) -> torch.Tensor:
    calls = rows(policy.vocabulary)
    ids = np.concatenate([row.completion_ids for row in calls]).astype(np.int64)
    ones = np.ones(len(ids))
    settings = TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), np.zeros(len(ids)))
    parts = [
        (row.target_numbers, policy.row_logprobs(row, settings, adapter=adapter)[0])
        for row in plan(calls, layout, 4096, policy.shape).rows
    ]
    order = np.argsort(np.concatenate([ids for ids, _ in parts]))
    return torch.cat([values for _, values in parts])[torch.from_numpy(order)]


def answers(loader: Literal["peft", "unsloth"], base: Path) -> dict[str, torch.Tensor]:
    """First weights for a seed, logprobs with and without the adapter, and gradients, on plain rows and on the tree."""
    policy = Policy.load(base, LoraOptions(), threads=1, loader=loader)
    assert policy.loader == loader
    assert mask_probe(policy) is None, policy.tree_refused
    policy.reset_adapter(LORA)
    found = {f"first|{name}": value.clone() for name, value in policy.adapter_weights().items()}
    warm(policy)
    layouts: tuple[LayoutName, ...] = ("tree", "call_rows")
    for layout in layouts:
        with torch.no_grad():
            found[f"base|{layout}"] = logprobs(policy, layout, adapter=False)
        values = logprobs(policy, layout)
        found[f"logprobs|{layout}"] = values.detach()
        parameters = policy.trainable_parameters()
        for name, grad in zip(parameters, torch.autograd.grad(values.sum(), list(parameters.values())), strict=True):
            found[f"grad|{layout}|{name}"] = grad
    found["recomputed"] = torch.tensor(
        sum(module.training and getattr(module, "gradient_checkpointing", False) for module in policy.model.modules())
    )
    return found


if __name__ == "__main__":
    loader, base, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    assert loader == "peft" or loader == "unsloth", loader
    save_file({name: value.contiguous() for name, value in answers(loader, base).items()}, output)
