"""A base in float16, for GPUs without bfloat16: gradients neither vanish nor overflow, and the adapter stays float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offbook
from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import NotFiniteError
from offbook.engine import checkpoint_files
from offbook.engine.learner import checkpoints
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.selection import no_gradient
from offbook.engine.learner.targets.batch import TrainBatch
from offbook.engine.learner.update.step import (
    FIRST,
    LOWEST,
    PATIENCE,
    LossScale,
    Step,
    StepTotals,
)
from offbook.engine.precision import dtype_of
from tests.engine.learner.jobs import command, random_groups, write_toy_base
from tests.engine.learner.test_invariance import Shifting, batch_of, distance, gradients
from tests.engine.learner.tiny_models import warm

LORA = LoraOptions(r=2, alpha=4)
SMALL = TrainConfig(loss="dr_grpo", max_tokens=10_000_000, max_grad_norm=1e9, importance_cap=None)
"""A constant denominator so large that each token's coefficient is below float16's smallest number."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose weights float16 holds exactly."""
    folder = write_toy_base(tmp_path_factory.mktemp("toy"))
    model = Policy.load(folder, LORA, dtype=torch.float16).model.unload()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def half(toy: Path) -> Policy:
    return warm(Policy.load(toy, LORA, dtype=torch.float16, threads=1))


@pytest.fixture(scope="module")
def expected(toy: Path, batch: TrainBatch) -> dict[str, Tensor]:
    """The same gradient in float32."""
    return gradients(warm(Policy.load(toy, LORA, dtype=torch.float32, threads=1)), batch, SMALL)[1][0]


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return batch_of(random_groups(3, turns=3))


def scaled(
    policy: Policy, batch: TrainBatch, scale: LossScale | None, config: TrainConfig = SMALL
) -> tuple[StepTotals, dict[str, Tensor]]:
    optimizer = Shifting(policy.trainable_parameters(), 0.0)
    outcome = Step(policy, optimizer, batch, config, 0, lambda *_: None, scale).run()
    return outcome, optimizer.gradients[-1]


def test_the_adapter_of_a_float16_base_is_float32_and_its_tree_is_sound(half: Policy) -> None:
    assert half.dtype == torch.float16
    assert {value.dtype for value in half.trainable_parameters().values()} == {torch.float32}
    assert mask_probe(half) is None


def test_without_a_scale_the_gradients_of_this_batch_vanish(half: Policy, batch: TrainBatch) -> None:
    optimizer = Shifting(half.trainable_parameters(), 0.0)
    outcome = Step(half, optimizer, batch, SMALL, 0, lambda *_: None).run()
    assert (outcome.updates, optimizer.gradients) == (0, [])
    assert "or their gradients vanished in float16" in no_gradient(batch, outcome, None, half=True).why


@pytest.mark.parametrize("layout", ["tree", "call_rows"])
def test_with_the_scale_they_are_those_of_float32(half: Policy, batch: TrainBatch, expected, layout: str) -> None:
    scale = LossScale()
    outcome, found = scaled(half, batch, scale, SMALL.model_copy(update={"layout": layout}))
    assert distance(found, expected) < 0.03
    assert all(float(value.abs().max()) > 0 for value in found.values())
    assert outcome.overflows == 0
    assert (scale.value, scale.clean) == (FIRST, 1)


@pytest.mark.parametrize("loss", ["dr_grpo", "gspo"])
def test_an_overflow_lowers_the_scale_and_computes_the_update_again(half: Policy, batch: TrainBatch, loss: str) -> None:
    config = SMALL.model_copy(update={"loss": loss, "kl_coef": 0.1})
    calm, wanted = scaled(half, batch, LossScale(), config)
    scale = LossScale(2.0**44, clean=7)
    reports: list[tuple[int, int]] = []
    optimizer = Shifting(half.trainable_parameters(), 0.0)
    outcome = Step(half, optimizer, batch, config, 0, lambda _, done, total: reports.append((done, total)), scale).run()
    assert outcome.overflows >= 1
    assert scale.value == 2.0**44 / 4**outcome.overflows
    assert scale.clean == 1
    assert distance(optimizer.gradients[-1], wanted) < 0.1
    assert outcome.losses == pytest.approx(calm.losses)
    assert (outcome.entered, outcome.clipped) == (calm.entered, calm.clipped)
    assert outcome.kl_sum == pytest.approx(calm.kl_sum)
    assert len(optimizer.gradients) == 1
    assert max(done for done, _ in reports) <= max(total for _, total in reports)


def test_a_scale_grows_after_many_clean_updates_and_has_a_floor() -> None:
    scale = LossScale()
    for _ in range(PATIENCE):
        scale.applied()
    assert (scale.value, scale.clean) == (FIRST * 2, 0)
    while scale.lower():
        assert scale.value >= LOWEST
    assert scale.value == LOWEST
    assert not scale.lower()


def test_a_base_whose_activations_leave_float16_fails_by_name_and_nothing_is_applied(toy: Path, tmp_path: Path) -> None:
    policy = Policy.load(toy, LORA, dtype=torch.float16, threads=1)
    for name, value in policy.model.named_parameters():
        if name.endswith("down_proj.base_layer.weight"):
            value.data *= 60_000
    learner = Learner(policy, "toy", lambda _: None)
    with pytest.raises(NotFiniteError, match="float16 ends at 65504"):
        learner.train(command(tmp_path, random_groups(0), 0))
    assert checkpoint_files.steps(tmp_path / "agent/checkpoints") == []


def test_steps_go_on_bit_for_bit_with_the_scale_of_the_checkpoint(toy: Path, tmp_path: Path) -> None:
    def learner() -> Learner:
        return Learner(Policy.load(toy, LORA, dtype=torch.float16, threads=1), "toy", lambda _: None)

    config = TrainConfig(learning_rate=1e-2, minibatches=2)
    once = learner()
    for step in range(3):
        result = once.train(command(tmp_path / "whole", random_groups(step), step, config))
    for step in range(3):
        learner().train(command(tmp_path / "halves", random_groups(step), step, config))
    whole, halves = (tmp_path / name / "agent/checkpoints/0003" for name in ("whole", "halves"))
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (whole / name).read_bytes() == (halves / name).read_bytes(), name
    assert checkpoints.load_optimizer(whole).scale == LossScale(FIRST, clean=6)
    assert (result.metrics["loss/scale"], result.metrics["loss/overflows"]) == (FIRST, 0)
    assert {value.dtype for value in load_file(whole / "adapter_model.safetensors").values()} == {torch.float32}
    single = Policy.load(toy, LORA, threads=1)
    single.load_adapter(whole)  # and a float32 base takes it


def test_a_step_in_float16_moves_the_probabilities_as_one_in_float32(toy: Path, tmp_path: Path) -> None:
    moved: list[dict[str, Tensor]] = []
    for dtype in (torch.float16, torch.float32):
        policy = Policy.load(toy, LORA, dtype=dtype, threads=1)
        Learner(policy, "toy", lambda _: None).train(command(tmp_path / str(dtype), random_groups(4), 0))
        moved.append({name: value.clone() for name, value in policy.adapter_weights().items() if "lora_B" in name})
    assert distance(moved[0], moved[1]) < 0.2  # AdamW's first step keeps signs only: small gradients may turn


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_takes_float16_on_gpus_older_than_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert dtype_of("auto", "cuda") == expected
    assert dtype_of("auto", "cpu") == torch.float32
    assert dtype_of("float32", "cuda") == torch.float32


@pytest.mark.slow("more real servers")
async def test_a_server_in_float16_samples_trains_and_agrees_with_its_learner(tmp_path: Path) -> None:
    backend = offbook.LocalBackend(tmp_path, threads=1, dtype="float16")
    try:
        model = offbook.TrainableModel(name="half", base_model="tiny", backend=backend)
        await model.register()

        async def rollout(number: int, reward: float) -> offbook.Trajectory:
            messages: list[Any] = [{"role": "user", "content": f"Tell me what you know of {number}."}]
            trajectory = offbook.Trajectory(messages_and_choices=messages, reward=reward)
            answer = await model.openai_client().chat.completions.create(
                model=model.name, messages=messages, max_tokens=24
            )
            trajectory.messages_and_choices.append(answer.choices[0])
            return trajectory

        for step in (1, 2):
            groups = await offbook.gather_trajectory_groups(
                offbook.TrajectoryGroup(rollout(number, float(place)) for place in range(4)) for number in (1, 2)
            )
            result = await model.train(groups, config=offbook.TrainConfig(learning_rate=1e-3))
            assert (result.applied, result.step) == (True, step)
            assert result.metrics["loss/scale"] == FIRST
            assert result.metrics["kl/sampler_learner"] < 1e-3
            assert result.metrics["grad_norm"] > 0
    finally:
        backend.close()
