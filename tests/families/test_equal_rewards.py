"""Rewards that differ by rounding are no signal: AdamW would make an update of any difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offbook.base.config import TrainConfig
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import JobTrajectory
from tests.engine.learner.jobs import LORA, command, sample
from tests.families.builders import ATTENTION, QWEN2_5, QWEN3_5, Family, build

ROUNDED = (0.1, float(np.float32(0.1)), 0.1)


def train(folder: Path, root: Path, rewards: tuple[float, ...], *, per_call: bool) -> tuple[bool, str, float]:
    """Whether the step was applied, the kind of a missing signal, and how far the LoRA's B moved from 0."""
    group = [
        JobTrajectory(
            f"rollout-{i}",
            reward,
            (sample(f"call-{i}", [30, 31], [40 + i]),),
            call_rewards=(reward,) if per_call else (),
        )
        for i, reward in enumerate(rewards)
    ]
    policy = Policy.load(folder, LORA, threads=1)
    result = Learner(policy, "base", lambda _: None).train(
        command(root, [group], 0, TrainConfig(call_rewards=per_call))
    )
    moved = [value for name, value in policy.trainable_parameters().items() if "lora_B" in name]
    largest = torch.stack([value.detach().abs().max() for value in moved]).max()
    return result.applied, result.no_signal or "", float(largest)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=family.name,
            marks=[] if family in (QWEN2_5, QWEN3_5) else [pytest.mark.slow("more model families")],
        )
        for family in (*ATTENTION, QWEN3_5)
    ],
)
def test_rewards_equal_up_to_rounding_make_no_step(family: Family, tmp_path: Path) -> None:
    folder = build(family, tmp_path / "base")
    for per_call in (False, True):
        root = tmp_path / f"per-call-{per_call}"
        assert train(folder, root, ROUNDED, per_call=per_call) == (False, "equal_rewards", 0.0)
        applied, _, moved = train(folder, root, (0.1, 0.2, 0.1), per_call=per_call)
        assert applied and moved > 0
