"""A base that is sharded over a team: gradients, losses and scores are those of one learner, and each holds its part."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offbook.base.config import LayoutName
from offbook.base.errors import EngineError
from offbook.engine.learner.model import loaders
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import completion_logprobs
from offbook.engine.learner.model.sharding import held_weights
from offbook.engine.learner.rows.layouts import ComputeRow, plan, row_cost
from offbook.engine.learner.team import deal_in_turn
from offbook.engine.sampling import TargetSettings
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.sharded_team import LORA, sharded_team
from tests.engine.learner.test_invariance import LOSSES, VOCABULARY, batch_of, config_of
from tests.engine.learner.test_team import assert_same, step_of
from tests.engine.learner.tiny_models import warm, write_base

Policies = Callable[[str, torch.dtype], Policy]


def test_a_sharded_base_gives_what_a_whole_one_gives_and_each_learner_holds_a_part(
    policies: Policies, base: Callable[[str], Path]
) -> None:
    whole = policies("qwen2", torch.float64)
    with sharded_team(base("qwen2"), torch.float64) as (team, policy):
        layers: Any = whole.model.get_base_model().model.layers  # pyright: ignore[reportAttributeAccessIssue]
        in_layers = sum(value.numel() for value in layers.parameters() if not value.requires_grad)
        assert held_weights(policy.model) == whole.base_parameters - in_layers / 2
        assert policy.base_parameters == whole.base_parameters
        warm(policy)
        odd = False
        for config in (
            config_of("grpo", layout="tree", row_tokens=64),
            config_of("gspo", layout="call_rows", epochs=2, minibatches=2, row_tokens=80),
        ):
            wanted = step_of(whole, config)
            odd |= any(len(part.rows) % 2 for part in wanted[0].plans)
            assert_same(step_of(policy, config, team.passes), wanted, 1e-12, 1e-12)
        assert odd, "one learner has a row less"
        tokens = ([1, 2, 3], [4, 5], 1.0)
        with team.accompanied(policy):
            for adapter in (True, False):
                values = completion_logprobs(policy, *tokens, adapter=adapter)
                torch.testing.assert_close(values, completion_logprobs(whole, *tokens, adapter=adapter))
        with pytest.raises(EngineError), team.accompanied(policy):  # as a probe that finds no adapter
            completion_logprobs(policy, *tokens)
            raise EngineError
        config = config_of("dapo", row_tokens=64)
        assert_same(step_of(policy, config, team.passes), step_of(whole, config), 1e-12, 1e-12)


@pytest.mark.slow("every loss with a sharded base")
def test_a_sharded_team_computes_every_loss_as_one_learner(policies: Policies, base: Callable[[str], Path]) -> None:
    whole = policies("qwen2", torch.float64)
    layouts: tuple[LayoutName, ...] = ("tree", "leaf_rows", "call_rows")
    with sharded_team(base("qwen2"), torch.float64, recomputed=True) as (team, policy):
        warm(policy)
        for loss in LOSSES:
            for layout, (epochs, minibatches, kl) in zip(layouts, ((1, 1, 0.0), (1, 2, 0.1), (2, 2, 0.1)), strict=True):
                config = config_of(loss, layout=layout, epochs=epochs, minibatches=minibatches, row_tokens=64)
                config = config.model_copy(update={"kl_coef": kl})
                assert_same(step_of(policy, config, team.passes), step_of(whole, config), 1e-12, 1e-12)


@pytest.mark.slow("waits longer than a collective may take")
def test_a_team_that_rests_longer_than_a_collective_may_take_goes_on(
    policies: Policies, base: Callable[[str], Path]
) -> None:
    whole, config = policies("qwen2", torch.float32), config_of("grpo", row_tokens=64)
    with sharded_team(base("qwen2"), torch.float32, seconds=30.0) as (team, policy):
        warm(policy)
        for rest in (0.0, 33.0):
            time.sleep(rest)
            assert_same(step_of(policy, config, team.passes), step_of(whole, config), 1e-6, 1e-5)


def test_rows_are_dealt_in_turn_so_that_the_learners_make_equally_many_passes(policies: Policies) -> None:
    shape = policies("qwen2", torch.float32).shape
    samples = batch_of(random_groups(3, groups=6, rollouts=4, turns=3, vocabulary=VOCABULARY)).samples
    rows = plan(samples, "call_rows", 64, shape).rows
    for size in (2, 3, 50):
        parts = deal_in_turn(rows, size, shape)
        assert len(parts) == size and len({len(part) for part in parts}) == 1
        dealt = [row for part in parts for row in part]
        added = [row for row in dealt if not row.target_numbers.size]
        assert len(added) == -len(rows) % size
        assert sorted(map(id, rows)) == sorted(id(row) for row in dealt if row.target_numbers.size)
        costs = [row_cost(row, shape) for row in dealt]
        for place in range(len(parts[0]) - 1):  # all of one pass cost at least what all of the next cost
            together, later = ([row_cost(part[i], shape) for part in parts] for i in (place, place + 1))
            assert min(together) >= max(later)
        assert max(costs) == row_cost(parts[0][0], shape)
    assert deal_in_turn([], 3, shape) == [(), (), ()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_targets_is_a_pass_whose_gradient_is_zero(
    base: Callable[[str], Path], dtype: torch.dtype
) -> None:
    policy = warm(Policy.load(base("qwen2"), LORA, dtype=dtype))
    logprobs, entropy, kept = policy.row_logprobs(ComputeRow.without_targets(), TargetSettings.none())
    assert logprobs.shape == entropy.shape == kept.shape == (0,)
    (logprobs.sum() * 0).backward()
    gradients = [value.grad for value in policy.trainable_parameters().values()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    with torch.no_grad():
        policy.pass_without_targets()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_base_in_the_precision_of_its_files_is_mapped_and_takes_no_memory_before_it_is_sharded(
    tmp_path: Path,
) -> None:
    folder = write_base(tmp_path / "base", "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    before = own_memory()
    model = loaders._with_transformers(folder, "cpu", torch.float32, "sdpa", four_bit=False)
    assert size > 100 * 2**20 and own_memory() - before < size / 4
    del model


def own_memory() -> int:
    """Bytes of this process that are no pages of a file."""
    gc.collect()
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
