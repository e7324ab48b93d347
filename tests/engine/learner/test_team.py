"""A team of learners: gradients, losses, metrics and token files are those of one learner, whoever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from offbook.base.config import LayoutName, LoraOptions, TrainConfig
from offbook.base.errors import ConfigError, TrainError
from offbook.base.types import TrainResult
from offbook.engine import token_file
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.layouts import plan, row_cost
from offbook.engine.learner.team import Team, deal, follow
from offbook.engine.learner.update.row_pass import RowPass
from offbook.engine.learner.update.step import RowPasses, Step, StepTotals
from tests.engine.learner.jobs import command, random_groups
from tests.engine.learner.test_invariance import LOSSES, VOCABULARY, Shifting, batch_of, config_of, distance
from tests.engine.learner.test_smaller_rows import SmallDevice
from tests.engine.learner.tiny_models import exact

Policies = Callable[[str, torch.dtype], Policy]
LORA = LoraOptions(r=2, alpha=4)


class Gone(Exception):
    """A learner has ended."""


@contextmanager
def team_of(*others: Any) -> Iterator[Team]:
    """A team whose other learners are threads of this process, with these policies, or with functions that load them."""

    def lost(rank: int) -> NoReturn:
        raise Gone(rank)

    ends = [Pipe() for _ in others]
    loads = [other if callable(other) else lambda other=other: other for other in others]
    threads = [
        threading.Thread(target=follow, args=(theirs, load, "cpu"), daemon=True)
        for (_, theirs), load in zip(ends, loads, strict=True)
    ]
    for thread in threads:
        thread.start()
    yield Team([ours for ours, _ in ends], lost)
    for ours, _ in ends:
        ours.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def unprobed(_: Policy) -> None:
    """In place of the probes of attention, which have tests of their own."""


def step_of(
    policy: Any, config: TrainConfig, passes: RowPasses = RowPass, seed: int = 7, shifted: Policy | None = None
) -> tuple[StepTotals, list[dict[str, torch.Tensor]]]:
    """The totals and the gradients of the updates."""
    batch = batch_of(random_groups(seed, groups=4, rollouts=4, turns=3, vocabulary=VOCABULARY), config.loss)
    optimizer = Shifting((shifted or policy).trainable_parameters(), 0.02)
    try:
        totals = Step(policy, optimizer, batch, config, 0, lambda *_: None, passes=passes).run()  # pyright: ignore[reportArgumentType]
    finally:
        optimizer.restore()
    return totals, optimizer.gradients


def assert_same(
    found: tuple[StepTotals, list[dict[str, torch.Tensor]]],
    wanted: tuple[StepTotals, list[dict[str, torch.Tensor]]],
    gradient: float,
    value: float,
) -> None:
    totals, gradients = found
    whole, expected = wanted
    assert len(gradients) == len(expected) > 0
    assert max(distance(a, b) for a, b in zip(gradients, expected, strict=True)) <= gradient
    for name in ("losses", "grad_norms", "kl_sum"):
        assert getattr(totals, name) == pytest.approx(getattr(whole, name), rel=max(gradient, value), abs=1e-12), name
    for name in ("entered", "ratios", "clipped", "kl_counted", "updates"):
        assert getattr(totals, name) == getattr(whole, name), name
    for name in ("old", "last"):
        for part, own in vars(getattr(whole, name)).items():
            torch.testing.assert_close(getattr(getattr(totals, name), part), own, rtol=value, atol=value)


def loaded(base: Path, dtype: torch.dtype) -> Policy:
    """A policy of its own, whose adapter is not that of the first learner: a task must bring it."""
    return Policy.load(base, LoraOptions(r=4, alpha=4), dtype=dtype)


def test_two_learners_compute_what_one_computes(policies: Policies, base: Callable[[str], Path]) -> None:
    policy = policies("qwen2", torch.float32)
    with team_of(loaded(base("qwen2"), torch.float32)) as team:
        team.join(policy, unprobed)
        for config in (
            config_of("grpo", layout="tree", row_tokens=64),
            config_of("gspo", layout="call_rows", epochs=2, minibatches=2, row_tokens=64),
        ):
            wanted = step_of(policy, config)
            assert max(len(part.rows) for part in wanted[0].plans) > 2
            assert_same(step_of(policy, config, team.passes), wanted, 1e-6, 1e-5)


@pytest.mark.slow("every loss in a team")
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float64), (4, torch.float32)])
def test_a_team_computes_every_loss_as_one_learner(
    policies: Policies, base: Callable[[str], Path], size: int, dtype: torch.dtype
) -> None:
    policy = policies("qwen2", dtype)
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    layouts: tuple[LayoutName, ...] = ("tree", "leaf_rows", "call_rows")

    others = [loaded(base("qwen2"), dtype) for _ in range(size - 1)]
    with team_of(*[exact(other) if dtype == torch.float64 else other for other in others]) as team:
        team.join(policy, unprobed)
        for loss in LOSSES:
            for layout, (epochs, minibatches, kl) in zip(layouts, ((1, 1, 0.0), (1, 2, 0.1), (2, 2, 0.1)), strict=True):
                config = config_of(loss, layout=layout, epochs=epochs, minibatches=minibatches, row_tokens=64)
                config = config.model_copy(update={"kl_coef": kl})
                wanted = step_of(policy, config)
                assert_same(step_of(policy, config, team.passes), wanted, limit, 1e-12 if limit < 1e-9 else 1e-5)


def test_a_row_that_is_too_large_for_one_learner_is_split_there_and_one_that_stays_so_is_a_named_error(
    policies: Policies, base: Callable[[str], Path]
) -> None:
    policy = policies("qwen2", torch.float64)
    config = config_of("grpo", layout="tree", row_tokens=64)
    wanted = step_of(policy, config)
    largest = max(row.token_ids.size for row in deal(wanted[0].plans[0].rows, 2, policy.shape)[1])
    small: list[SmallDevice] = []

    def load(largest: int) -> SmallDevice:
        policy = exact(loaded(base("qwen2"), torch.float64))
        small.append(SmallDevice(policy, 2**31, "backward"))
        small[-1]._largest = largest
        policy.reset_adapter(LORA)
        for name in ("device", "four_bit", "lora"):
            setattr(small[-1], name, getattr(policy, name))
        return small[-1]

    with team_of(load(largest)) as team:
        team.join(policy, unprobed)
        assert_same(step_of(policy, config, team.passes), wanted, 1e-9, 1e-9)
        assert small[0].refused == [largest]
    with team_of(load(1)) as team:
        team.join(policy, unprobed)
        with pytest.raises(TrainError, match=r"^learner 2 of 2: the learner ran out of memory") as failed:
            step_of(policy, config, team.passes)
        assert failed.value.reason == "out_of_memory"
        small[-1]._largest = 2**31
        assert_same(step_of(policy, config, team.passes), wanted, 1e-9, 1e-9)  # nothing of the failed step is left


def test_the_first_learner_running_out_of_memory_leaves_no_answer_for_the_next_step(
    policies: Policies, base: Callable[[str], Path]
) -> None:
    policy = policies("qwen2", torch.float64)
    config = config_of("grpo", layout="tree", row_tokens=64)
    wanted = step_of(policy, config)
    device: Any = SmallDevice(policy, 1, "forward")
    device.lora = policy.lora
    with team_of(exact(loaded(base("qwen2"), torch.float64))) as team:
        team.join(policy, unprobed)
        with pytest.raises(torch.OutOfMemoryError):
            step_of(device, config, team.passes, shifted=policy)
        device.hook.remove()
        assert_same(step_of(policy, config, team.passes), wanted, 1e-9, 1e-9)


def test_rows_are_dealt_by_cost_and_a_team_has_one_plan(policies: Policies, base: Callable[[str], Path]) -> None:
    policy = policies("qwen2", torch.float32)
    samples = batch_of(random_groups(3, groups=6, rollouts=4, turns=3, vocabulary=VOCABULARY)).samples
    rows = plan(samples, "call_rows", 64, policy.shape).rows
    for size in (1, 2, 3, 50):
        parts = deal(rows, size, policy.shape)
        assert len(parts) == size
        assert sorted(map(id, rows)) == sorted(id(row) for part in parts for row in part)
        costs = [sum(row_cost(row, policy.shape) for row in part) for part in parts]
        largest = max(row_cost(row, policy.shape) for row in rows)
        assert max(costs) - min(costs) <= largest

    own, second, third = (loaded(base("qwen2"), torch.float32) for _ in range(3))
    third.tree_refused = "no trees here"
    with team_of(second, third) as team:
        team.join(own, unprobed)
        assert own.tree_refused == "learner 3 of 3: no trees here"
        config = config_of("dapo", row_tokens=64)
        wanted = step_of(own, config)
        assert_same(step_of(own, config, team.passes), wanted, 1e-6, 1e-5)


def test_a_learner_that_cannot_load_the_base_is_named(policies: Policies, tmp_path: Path) -> None:
    with team_of(lambda: Policy.load(tmp_path / "nowhere", LORA)) as team, pytest.raises(ConfigError) as failed:
        team.join(policies("qwen2", torch.float32), unprobed)
    assert str(failed.value).startswith("learner 2 of 2: ")
    assert "nowhere" in str(failed.value)


@pytest.mark.slow("whole learners")
def test_a_whole_step_has_the_metrics_and_the_token_file_of_one_learner(toy: Path, tmp_path: Path) -> None:
    config = TrainConfig(learning_rate=1e-2, loss="gspo", kl_coef=0.05, epochs=2, minibatches=2, row_tokens=64)
    config_self = config.model_copy(update={"loss": "grpo", "distill": None})
    found: dict[str, list[TrainResult]] = {}
    with team_of(Policy.load(toy, LoraOptions(), threads=1)) as team:
        for name, passes in (("one", RowPass), ("team", team.passes)):
            policy = Policy.load(toy, LoraOptions(), threads=1)
            if name == "team":
                team.join(policy, unprobed)
            learner = Learner(policy, "toy", lambda _: None, passes=passes)
            found[name] = []
            for step, chosen in enumerate((config, config_self)):
                sent = command(tmp_path / name, random_groups(step, groups=4), step, chosen)
                found[name].append(learner.train(sent.model_copy(update={"keep_tokens": 3})))
    for step in (0, 1):
        one, team_result = found["one"][step], found["team"][step]
        assert team_result.applied
        assert one.metrics.keys() == team_result.metrics.keys()
        for name, value in one.metrics.items():
            if not name.startswith("seconds/"):
                assert team_result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        files = [token_file.read(token_file.path_of(tmp_path / name / "agent/tokens", step + 1)) for name in found]
        for name, values in vars(files[0]).items():
            if isinstance(values, np.ndarray):
                np.testing.assert_allclose(getattr(files[1], name), values, rtol=2e-3, atol=1e-4, err_msg=name)
