"""The token file of a step holds the learner's own arrays, token by token, and never costs the step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import EngineError
from offbook.base.types import TrainResult
from offbook.engine import token_file
from offbook.engine.learner import learner as learner_module
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.batch import TrainBatch
from offbook.engine.learner.update.loss import importance_weights
from offbook.engine.learner.update.step import StepTotals
from offbook.engine.protocol import JobTrajectory, Progressed, TrainCommand, Warned
from offbook.engine.token_file import CLIPPED, TRAINED, TokenFile
from tests.engine.learner.jobs import command, random_groups, sample


class Lab:
    """A learner that remembers the batch and the outcome of its last step."""

    def __init__(self, base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.events: list[Progressed | Warned] = []
        self.learner = Learner(Policy.load(base, LoraOptions(), threads=1), "toy", self.events.append)
        self.batch: TrainBatch | None = None
        self.outcome: StepTotals | None = None
        inner = learner_module.make_token_file

        def seen(command: TrainCommand, job: object, batch: TrainBatch, outcome: StepTotals) -> TokenFile:
            self.batch, self.outcome = batch, outcome
            return inner(command, job, batch, outcome)  # type: ignore[arg-type]

        monkeypatch.setattr(learner_module, "make_token_file", seen)

    @property
    def folder(self) -> Path:
        return self.root / "agent" / "tokens"

    def train(
        self,
        groups: object,
        step: int,
        *,
        keep: int = 10,
        config: TrainConfig | None = None,
        request: str | None = None,
    ) -> TrainResult:
        made = command(self.root, groups, step, config, request_id=request)  # type: ignore[arg-type]
        return self.learner.train(made.model_copy(update={"keep_tokens": keep}))


@pytest.fixture
def lab(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(toy, tmp_path, monkeypatch)


def pair(answer: tuple[int, ...] = (10, 11)) -> tuple[JobTrajectory, ...]:
    calls = [sample(f"call-{i}", [5, 6, 7], [*answer, 12 + i]) for i in range(2)]
    return tuple(JobTrajectory(f"traj-{i}", float(i), (calls[i],)) for i in range(2))


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(learning_rate=1e-2),
        TrainConfig(learning_rate=0.5, epochs=3, minibatches=2, epsilon=0.01),
        TrainConfig(learning_rate=1e-2, loss="gspo", epochs=2),
    ],
    ids=["one update", "clipped updates", "a sequence's ratio"],
)
def test_the_file_equals_the_learners_arrays_token_by_token(lab: Lab, config: TrainConfig) -> None:
    lab.train(random_groups(4), 0, config=config)
    tokens = token_file.read(token_file.path_of(lab.folder, 1))
    batch, outcome = lab.batch, lab.outcome
    assert batch is not None and outcome is not None
    assert tokens.token_ids.tolist() == batch.settings.token_ids.tolist()
    assert tokens.advantages.tolist() == batch.advantages.tolist()
    assert tokens.logprobs.astype(np.float64).tolist() == outcome.old.logprobs.tolist()  # computed in float32
    np.testing.assert_allclose(tokens.entropy, outcome.old.entropy.numpy(), rtol=1e-3)
    np.testing.assert_allclose(tokens.coefficients, outcome.last.coefficients.numpy(), rtol=1e-6)
    assert ((tokens.flags & TRAINED) > 0).tolist() == outcome.old.kept.tolist()
    assert ((tokens.flags & CLIPPED) > 0).tolist() == outcome.last.clipped.tolist()
    if config.epsilon == 0.01:
        assert outcome.last.clipped.any()
    sampler = torch.from_numpy(batch.sampler)
    used = ~torch.isnan(sampler)
    ratios = torch.from_numpy(tokens.ratios)[used]
    weights = importance_weights(outcome.old.logprobs, sampler, 1e9)[used]
    assert ratios.tolist() == pytest.approx(weights.tolist(), rel=1e-12)
    moved = torch.exp(outcome.last.logprobs - outcome.old.logprobs)
    assert tokens.update_ratios.tolist() == pytest.approx(moved.tolist(), rel=1e-6)


def test_each_call_knows_its_trajectory_its_tokens_and_its_path_through_the_tree(lab: Lab) -> None:
    groups = random_groups(4)
    lab.train(groups, 0)
    tokens = token_file.read(token_file.path_of(lab.folder, 1))
    samples = {s.call_id: (t.id, s) for group in groups for t in group for s in t.samples}
    assert {call.call_id for call in tokens.head.calls} <= samples.keys()
    for call in tokens.head.calls:
        trajectory, recorded = samples[call.call_id]
        here = slice(call.offset, call.offset + call.tokens)
        assert (call.trajectory, call.prompt) == (trajectory, len(recorded.prompt_ids))
        assert tokens.token_ids[here].tolist() == recorded.completion_ids.tolist()
        np.testing.assert_array_equal(tokens.recorded[here], recorded.logprobs)
        length = sum(int(tokens.segment_length[segment]) for segment in tokens.path(call.leaf))
        ends = length - int(tokens.segment_length[call.leaf])
        assert ends < recorded.length <= length  # its last token is in its leaf


def test_only_the_newest_steps_keep_a_file_and_zero_keeps_none(lab: Lab) -> None:
    for step in range(4):
        lab.train([pair()], step, keep=2)
    assert sorted(path.name for path in lab.folder.iterdir()) == ["0003.safetensors", "0004.safetensors"]
    lab.train([pair()], 4, keep=0)
    assert not token_file.path_of(lab.folder, 5).exists()


def test_a_step_without_a_gradient_keeps_its_file_apart(lab: Lab) -> None:
    """Rollouts with other rewards sampled the same, so that their gradients cancel."""
    same = tuple(
        JobTrajectory(t.id, t.reward, tuple(sample(s.call_id, s.prompt_ids.tolist(), [10]) for s in t.samples))
        for t in pair()
    )
    result = lab.train([same], 0)
    assert (result.applied, result.no_signal) == (False, "zero_gradient")
    head = token_file.read_head(token_file.path_of(lab.folder, 1, applied=False))
    assert (head.step, head.applied, head.updates) == (1, False, 0)
    assert not token_file.path_of(lab.folder, 1).exists()


def test_a_full_disk_costs_the_file_and_not_the_step(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        if "tokens" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("offbook.engine.checkpoint_files.os.fsync", full)
    result = lab.train([pair()], 0)
    assert result.applied and (lab.root / "agent" / "checkpoints" / "0001").is_dir()
    assert "the token file of step 1 was not kept" in result.warnings[0] and "no space is left" in result.warnings[0]
    assert [event.message for event in lab.events if isinstance(event, Warned)] == list(result.warnings)
    assert list(lab.folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "other", "newer"])
def test_a_damaged_file_is_an_error_with_its_name(lab: Lab, damage: str) -> None:
    lab.train([pair()], 0)
    path = token_file.path_of(lab.folder, 1)
    content = path.read_bytes()
    changed = {"cut": content[:-5], "other": b"{}", "newer": content.replace(b'\\"format\\":1', b'\\"format\\":9')}
    path.write_bytes(changed[damage])
    with pytest.raises(EngineError, match=r"0001\.safetensors cannot be read"):
        token_file.read(path)


def test_a_fifo_in_place_of_a_file_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(token_file.path_of(tmp_path, 1))
    token_file.path_of(tmp_path, 2).write_bytes(b"")
    assert token_file.files(tmp_path) == [token_file.path_of(tmp_path, 2)]
