"""What the learner puts into host memory comes back bit by bit, and training goes on as if it had stayed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbook.base.config import TrainConfig
from offbook.base.types import TrainResult
from offbook.engine.learner.__main__ import parse
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.service import HostMemory, Service
from offbook.engine.protocol import Trained
from tests.engine.learner.jobs import LORA, command, random_groups, write_toy_base

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_base(tmp_path_factory.mktemp("toy"))


def learner_on(base: Path) -> tuple[Learner, Policy, HostMemory]:
    policy = Policy.load(base, LORA, threads=1)
    learner = Learner(policy, "toy", lambda _: None)
    return learner, policy, HostMemory(lambda: policy.model, lambda: learner.optimizer, CPU)


def held(policy: Policy, learner: Learner) -> list[torch.Tensor]:
    states = learner.optimizer.state.values() if learner.optimizer is not None else []
    moments = [value for state in states for value in state.values()]
    return [*policy.model.parameters(), *policy.model.buffers(), *moments]


def train(learner: Learner, root: Path, step: int) -> TrainResult:
    return learner.train(command(root, random_groups(step), step))


def test_a_round_trip_changes_the_storage_and_not_a_bit(base: Path, tmp_path: Path) -> None:
    learner, policy, memory = learner_on(base)
    train(learner, tmp_path, 0)
    tensors = held(policy, learner)
    before, places = [value.detach().clone() for value in tensors], [value.data_ptr() for value in tensors]
    memory.leave()
    assert memory.away
    assert all(a.data_ptr() != b for a, b in zip(tensors, places, strict=True))
    memory.leave()  # nothing more to move
    memory.back()
    assert not memory.away
    after = held(policy, learner)
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_steps_with_trips_between_them_are_the_steps_without(base: Path, tmp_path: Path) -> None:
    stayed, policy, _ = learner_on(base)
    moved, other, memory = learner_on(base)
    memory.leave()
    for step in range(3):
        expected = train(stayed, tmp_path / "stayed", step)
        with memory.on_device():
            found = train(moved, tmp_path / "moved", step)
        assert memory.away
        assert found.metrics["grad_norm"] == expected.metrics["grad_norm"]
    memory.back()
    assert all(torch.equal(a, b) for a, b in zip(held(other, moved), held(policy, stayed), strict=True))


def test_the_learners_process_is_in_host_memory_between_steps_and_keeps_rows_below_its_limit(
    base: Path, tmp_path: Path
) -> None:
    results: list[TrainResult] = []
    for name, flags in (("stays", []), ("moves", ["--offload", "--row-limit", "64"])):
        service = Service(parse(["--base", str(base), "--device", "cpu", "--threads", "1", *flags]), io.StringIO())
        service.ready()
        assert service.offloaded is (name == "moves")
        for step in range(2):
            config = TrainConfig(learning_rate=1e-2, layout="call_rows")
            event = service.answer(command(tmp_path / name, random_groups(step), step, config))
            assert isinstance(event, Trained)
            assert service.offloaded is (name == "moves")
            results.append(event.result)
    stays, moves = results[1], results[3]
    assert moves.metrics["grad_norm"] == pytest.approx(stays.metrics["grad_norm"], rel=1e-4)
    saved = [load_file(f"{result.checkpoint}/adapter_model.safetensors") for result in (stays, moves)]
    for weights, expected in zip(saved[1].values(), saved[0].values(), strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("flags", [[], ["--offload"]])
def test_before_it_is_ready_the_learner_gives_back_what_its_probe_took(
    base: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """On a GPU that vLLM shares, which starts next: workspaces of cuBLAS first, since they lie in the cache."""
    service = Service(parse(["--base", str(base), "--device", "cpu", "--threads", "1", *flags]), io.StringIO())
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: released.append("workspaces"), raising=False)
    service.ready()
    assert released == ["workspaces", "cache"]


def test_the_copy_of_frozen_weights_is_made_once(base: Path) -> None:
    learner, policy, memory = learner_on(base)
    frozen = next(value for value in policy.model.parameters() if not value.requires_grad)
    places: list[int] = []
    for _ in range(2):
        memory.leave()
        places.append(frozen.data_ptr())
        memory.back()
    assert places[0] == places[1]
    assert learner.optimizer is None


def test_a_step_that_fails_leaves_everything_in_host_memory(base: Path, tmp_path: Path) -> None:
    learner, policy, memory = learner_on(base)
    memory.leave()
    with pytest.raises(RuntimeError, match="broken"), memory.on_device():
        raise RuntimeError("broken")
    assert memory.away
    with memory.on_device():
        assert train(learner, tmp_path, 0).applied
    assert all(value.grad is None for value in policy.model.parameters())


@pytest.mark.parametrize("failing", [0, 3])
def test_a_device_that_is_full_loses_nothing(base: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    learner, policy, memory = learner_on(base)
    before = [value.detach().clone() for value in held(policy, learner)]
    memory.leave()
    _break_at(memory, monkeypatch, failing)
    with pytest.raises(torch.OutOfMemoryError), memory.on_device():
        raise AssertionError("it did not come back whole")
    monkeypatch.undo()
    memory.back()
    assert all(torch.equal(a, b) for a, b in zip(held(policy, learner), before, strict=True))


def _break_at(memory: HostMemory, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The device takes `count` tensors and no more."""
    place: Callable[[torch.Tensor], torch.Tensor] = memory._to_device
    room = iter(range(count))

    def full(tensor: torch.Tensor) -> torch.Tensor:
        if next(room, None) is None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return place(tensor)

    monkeypatch.setattr(memory, "_to_device", full)
