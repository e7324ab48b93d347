"""Logprobs and gradients do not depend on layout, packing, splitting or order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.base.config import LayoutName
from offbook.engine.learner.model.attention import TreeContext, by_runs, tree_attention
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import (
    ComputeRow,
    _leaf_paths,
    _packed,
    plan,
)
from offbook.engine.protocol import Sample
from offbook.engine.sampling import TargetSettings
from offbook.engine.token_tree import build_tree

VOCABULARY = 29
LAYOUTS = get_args(LayoutName)
EXAMPLES = settings().max_examples
"""The tier's."""
Policies = Callable[[str, torch.dtype], Policy]
Calls = list[tuple[list[int], list[int]]]
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@st.composite
def calls(draw: st.DrawFn) -> Calls:
    """Calls of a step: turns that go on from earlier calls, branches inside them, repeats, and fresh starts."""
    made: Calls = [(draw(tokens), draw(tokens))]
    for _ in range(draw(st.integers(0, 7))):
        prompt, completion = draw(st.sampled_from(made))
        kind = draw(st.sampled_from(["turn", "sample", "repeat", "fork", "fresh"]))
        if kind == "turn":
            made.append((prompt + completion + draw(tokens), draw(tokens)))
        elif kind == "sample":
            made.append((prompt, draw(tokens)))
        elif kind == "repeat":
            made.append((prompt, completion))
        elif kind == "fork":
            whole = prompt + completion
            made.append((whole[: draw(st.integers(1, len(whole)))], draw(tokens)))
        else:
            made.append((draw(tokens), draw(tokens)))
    return draw(st.permutations(made))


def as_rows(made: Calls) -> list[Sample]:
    offsets = np.cumsum([0, *(len(completion) for _, completion in made)])
    return [
        Sample.bare(np.array(p, np.int32), np.array(c, np.int32), int(o))
        for (p, c), o in zip(made, offsets[:-1], strict=True)
    ]


def as_targets(rows: Sequence[Sample], seed: int) -> TargetSettings:
    """Sampled tokens with a temperature of their own each, and no filters."""
    ids = np.concatenate([row.completion_ids for row in rows]).astype(np.int64)
    draw = np.random.default_rng(seed)
    ones = np.ones(len(ids))
    return TargetSettings(ids, draw.choice([0.7, 1.0, 1.5], len(ids)), ones, np.zeros(len(ids), np.int64), 0 * ones)


def computed(
    policy: Policy,
    rows: Sequence[Sample],
    layout: LayoutName,
    row_tokens: int,
    chunk: int = 512,
    planned: Sequence[ComputeRow] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All logprobs by target number, and the gradient of a fixed random combination of them."""
    targets = as_targets(rows, 3)
    weights = torch.from_numpy(np.random.default_rng(4).normal(size=len(targets.token_ids)))
    logprobs = torch.full((len(weights),), torch.nan, dtype=torch.float64)
    parameters = list(policy.trainable_parameters().values())
    total = [torch.zeros_like(value) for value in parameters]
    for row in plan(rows, layout, row_tokens, policy.shape).rows if planned is None else planned:
        values, _, _ = policy.row_logprobs(row, targets, logits_chunk=chunk)
        at = torch.from_numpy(row.target_numbers)
        assert torch.isnan(logprobs[at]).all(), "a target was computed twice"
        logprobs[at] = values.detach().double()
        for part, grad in zip(total, torch.autograd.grad((values * weights[at]).sum(), parameters), strict=True):
            part += grad
    assert not torch.isnan(logprobs).any(), "a target was not computed"
    return logprobs, torch.cat([part.flatten() for part in total]).double()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in the 2-norm."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@settings(max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=calls(), row_tokens=st.sampled_from([1, 8, 20, 64, 4096]), chunk=st.sampled_from([1, 7, 512]))
def test_every_layout_and_split_gives_the_reference_logprobs_and_gradients(
    policies: Policies, family: str, made: Calls, row_tokens: int, chunk: int
) -> None:
    policy = policies(family, torch.float64)
    rows = as_rows(made)
    logprobs, gradient = computed(policy, rows, "call_rows", 1)  # one row at a time: no padding, no tree
    for layout in LAYOUTS:
        found, found_gradient = computed(policy, rows, layout, row_tokens, chunk)
        assert distance(found, logprobs) < 1e-10, layout
        assert distance(found_gradient, gradient) < 1e-9, layout


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@settings(max_examples=EXAMPLES // 6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=calls(), row_tokens=st.sampled_from([20, 4096]))
def test_leaf_rows_packed_as_a_forest_give_the_logprobs_and_gradients_of_call_rows(
    policies: Policies, made: Calls, row_tokens: int
) -> None:
    policy, rows = policies("qwen2", torch.float64), as_rows(made)
    paths = _leaf_paths(build_tree(rows))
    packed = _packed(paths, row_tokens, policy.shape)
    assert all(row.forest is not None and (row.forest.segments.parent < 0).all() for row in packed)
    assert all(row.tokens <= max(row_tokens, *(len(path.token_ids) for path in paths)) for row in packed)
    assert sum(row.tokens for row in packed) == sum(len(path.token_ids) for path in paths)
    logprobs, gradient = computed(policy, rows, "call_rows", 1)
    found, found_gradient = computed(policy, rows, "leaf_rows", row_tokens, planned=packed)
    assert distance(found, logprobs) < 1e-10
    assert distance(found_gradient, gradient) < 1e-9


def test_leaf_rows_of_different_lengths_are_packed_and_those_of_one_length_are_a_batch() -> None:
    shape = ModelShape(layers=1, heads=1, head_dim=1, linear=10**6, lora=10, head=100, call_flops=1e6)
    rows = as_rows([([i, *range(2 * i)], [1, 2]) for i in range(1, 9)])
    [packed] = plan(rows, "leaf_rows", 4096, shape).rows
    assert packed.forest is not None and len(packed.forest.segments) == 8
    assert all(row.forest is None for row in plan(rows, "leaf_rows", 4096, shape, tree_refused="a reason").rows)
    [batch] = plan(as_rows([([i, 1, 2], [1, 2]) for i in range(8)]), "leaf_rows", 4096, shape).rows
    assert batch.forest is None and batch.token_ids.shape == (8, 5)


@settings(max_examples=EXAMPLES, deadline=None)
@given(made=calls(), longest=st.integers(1, 60))
def test_no_forest_is_longer_than_the_models_table_of_positions(made: Calls, longest: int) -> None:
    rows = as_rows(made)
    shape = ModelShape(layers=1, heads=1, head_dim=1, linear=1000, lora=10, head=100, longest_row=longest)
    deepest = max(len(path.token_ids) for path in _leaf_paths(build_tree(rows)))
    layouts: tuple[LayoutName, ...] = ("tree", "leaf_rows")
    for layout in layouts:
        for row in plan(rows, layout, 4096, shape).rows:
            assert row.forest is None or row.tokens <= max(longest, deepest)


@settings(max_examples=EXAMPLES // 6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=calls(), row_tokens=st.sampled_from([12, 4096]))
def test_single_precision_agrees_with_the_reference_to_1e_4(policies: Policies, made: Calls, row_tokens: int) -> None:
    rows = as_rows(made)
    logprobs, gradient = computed(policies("qwen2", torch.float64), rows, "call_rows", 1)
    for layout in LAYOUTS:
        found, found_gradient = computed(policies("qwen2", torch.float32), rows, layout, row_tokens)
        assert distance(found, logprobs) < 1e-4, layout
        assert distance(found_gradient, gradient) < 1e-4, layout


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=calls(), data=st.data())
def test_the_order_of_the_calls_changes_nothing(policies: Policies, made: Calls, data: st.DataObject) -> None:
    policy, rows = policies("qwen2", torch.float64), as_rows(made)
    shuffled = data.draw(st.permutations(rows))
    first, second = (plan(order, "tree", 30, policy.shape) for order in (rows, shuffled))
    for a, b in zip(first.rows, second.rows, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert sorted(a.target_numbers.tolist()) == sorted(b.target_numbers.tolist())


@settings(max_examples=40, deadline=None)
@given(calls())
def test_the_portable_attention_of_other_devices_equals_the_cpus(made: Calls) -> None:
    shape = ModelShape(layers=1, heads=4, head_dim=8, linear=1000, lora=10, head=100)
    for row in plan(as_rows(made), "tree", 4096, shape).rows:
        assert row.forest is not None
        forest = row.forest
        states = torch.randn(3, 1, 4, row.token_ids.size, 8, dtype=torch.float64)
        answers: list[torch.Tensor] = []
        for portable in (False, True):
            query, key, value = (state.clone().requires_grad_() for state in states)
            if portable:
                out = by_runs(query, key, value, forest.segments, 8**-0.5).transpose(1, 2)
            else:
                tree = TreeContext(forest.segments, forest.pieces, forest.subtree_end)
                out = tree_attention(torch.nn.Identity(), query, key, value, None, offbook_tree=tree)[0]
            grads = torch.autograd.grad(out.sin().sum(), (query, key, value))
            answers.append(torch.cat([out.flatten(), *(grad.flatten() for grad in grads)]))
        assert torch.allclose(answers[0], answers[1], atol=1e-10)
