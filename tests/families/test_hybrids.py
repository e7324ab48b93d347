"""Families whose layers carry a state across positions, such as Qwen3.5: they train on plain rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import ConfigError
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import JobTrajectory
from tests.engine.learner.jobs import command, sample
from tests.families.builders import QWEN3_5, build

PROMPT = list(range(30, 60))
ANSWERS = [[100 + at, 7, 8, 200 + at] for at in range(4)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(QWEN3_5, tmp_path_factory.mktemp("qwen3_5"))


def plain_logprobs(folder: Path) -> list[list[float]]:
    """What the plain model gives each answer, one call at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[list[float]] = []
    for answer in ANSWERS:
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].float()
        found.append(torch.log_softmax(logits, -1)[range(len(answer)), answer].tolist())
    return found


def test_the_learner_trains_a_hybrid_on_plain_rows_with_the_plain_models_logprobs(hybrid: Path, tmp_path: Path) -> None:
    calls = [
        sample(f"call-{at}", PROMPT, answer, logprobs)
        for at, (answer, logprobs) in enumerate(zip(ANSWERS, plain_logprobs(hybrid), strict=True))
    ]
    group = [JobTrajectory(f"rollout-{at}", float(at), (call,)) for at, call in enumerate(calls)]
    learner = Learner(Policy.load(hybrid, LoraOptions(), threads=1), "hybrid", lambda _: None)
    result = learner.train(command(tmp_path, [group], 0, TrainConfig(learning_rate=1e-2)))
    assert result.applied and result.metrics["grad_norm"] > 0
    assert (result.metrics["layout/tree_refused"], result.metrics["layout/tree"]) == (1, 0)
    assert result.metrics["kl/sampler_learner_max_diff"] < 1e-3


def test_the_embedded_engine_refuses_layers_with_a_state_by_their_kind(hybrid: Path) -> None:
    with pytest.raises(ConfigError, match=r"linear_attention.*use --engine vllm"):
        load_model(hybrid, device="cpu", dtype="float32", max_model_len=None)
