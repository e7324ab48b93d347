"""FlexAttention on trees: its mask, its numbers against dense attention and the CPU's, and when it is chosen.

No GPU is needed: the same graph runs uncompiled on a CPU. Its backward pass exists there too, but torch refuses to start it
from a CPU tensor; the fixture `backward` lifts that one check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from offbook.engine.learner.model import attention
from offbook.engine.learner.model import attention as flex
from offbook.engine.learner.model.attention import (
    Choice,
    TreeContext,
    choose,
    tree_attention,
)
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.cost import (
    BLOCK,
    FLEX_CALLS,
    FLEX_SLOWDOWN,
    RUN_CALLS,
    AttentionName,
    ModelShape,
    blocks,
    tree_pairs,
)
from offbook.engine.learner.rows.layouts import Forest, plan
from tests.engine.learner.test_layouts import Calls, as_rows, as_targets, calls, distance

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=1, heads=6, head_dim=16, linear=1000, lora=10, head=100)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks for it
Policies = Callable[[str, torch.dtype], Policy]
SLOW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's backward pass from CPU tensors."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *states: None)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    choose.cache_clear()
    torch._dynamo.reset()
    yield
    choose.cache_clear()


def forest(made: Calls, stretch: int = 1) -> Forest:
    """The whole step as one tree row, each token repeated `stretch` times."""
    longer = [tuple(np.repeat(part, stretch).tolist() for part in call) for call in made]
    (row,) = plan(as_rows(longer), "tree", 10**6, SHAPE).rows  # type: ignore[arg-type]
    assert row.forest is not None
    return row.forest


def dense(ends: np.ndarray) -> np.ndarray:
    """Token q sees token k iff k <= q < subtree_end[k]; bool [q, k]."""
    at = np.arange(len(ends))
    return (at[None] <= at[:, None]) & (at[:, None] < ends[None])


@settings(max_examples=60, deadline=None)
@given(made=calls(), size=st.integers(2, 12))
def test_blocks_are_full_partial_or_empty_as_the_dense_mask_says(made: Calls, size: int) -> None:
    ends = forest(made).subtree_end
    found = blocks(ends, size)
    count = len(found.subtree_end) // size
    assert count >= 2
    sums = dense(found.subtree_end).reshape(count, size, count, size).sum((1, 3))
    assert found.full.tolist() == (sums == size * size).tolist()
    assert found.partial.tolist() == ((sums > 0) & (sums < size * size)).tolist()
    assert found.pairs == (sums > 0).sum() * size**2
    assert dense(found.subtree_end)[: len(ends), : len(ends)].tolist() == dense(ends).tolist()
    assert not dense(found.subtree_end)[: len(ends), len(ends) :].any(), "a token sees padding"


@SLOW
@given(made=calls(), stretch=st.integers(1, 20))
def test_the_block_mask_is_the_one_that_torch_makes_from_the_dense_mask(made: Calls, stretch: int) -> None:
    found = flex.flex_block_mask(forest(made, stretch).subtree_end, CPU)
    length = found.shape[-1]
    expected = torch_flex.create_block_mask(found.mask_mod, 1, 1, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    assert found.shape == expected.shape
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            mine, torchs = getattr(found, part), getattr(expected, part)
            assert mine.dtype == torchs.dtype
            assert torch.equal(mine, torchs), part


def states_of(
    heads: int, kv_heads: int, tokens: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [1, heads, tokens, 16], key and value [1, kv_heads, tokens, 16]."""
    query, key, value = (torch.randn(1, n, tokens, 16, **options) for n in (heads, kv_heads, kv_heads))
    return query, key, value


def answers(out: torch.Tensor, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output and the gradients of a combination of it, in one vector."""
    grads = torch.autograd.grad(out.sin().sum(), states)
    return torch.cat([out.detach().flatten(), *(grad.flatten() for grad in grads)])


def by_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: np.ndarray, scale: float
) -> torch.Tensor:
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=torch.from_numpy(dense(ends)), scale=scale)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize(("kv_heads", "scale"), [(2, 0.25), (6, 0.4)])
@SLOW
@given(made=calls(), stretch=st.integers(1, 6))
def test_flex_equals_dense_attention_and_the_cpus_forward_and_backward(
    backward: None, made: Calls, stretch: int, kv_heads: int, scale: float
) -> None:
    tree = forest(made, stretch)
    tokens = len(tree.subtree_end)
    draw = torch.Generator().manual_seed(tokens)
    states = states_of(6, kv_heads, tokens, dtype=torch.float64, generator=draw)
    for state in states:
        state.requires_grad_()
    expected = answers(by_dense(*states, tree.subtree_end, scale).transpose(1, 2), states)
    for name in ("flex", "flash_pieces", "runs"):
        context = TreeContext(tree.segments, tree.pieces, tree.subtree_end, name)
        out, _ = tree_attention(torch.nn.Identity(), *states, None, scaling=scale, offbook_tree=context)
        assert out.shape == (1, tokens, 6, 16)
        assert torch.allclose(answers(out, states), expected, atol=1e-10), name


def test_single_precision_agrees_with_double_to_1e_5() -> None:
    tree = forest([([0] * 150, [1] * 100), ([0] * 150, [2] * 90), ([0] * 150 + [2] * 40, [3] * 70)])
    states = states_of(6, 2, len(tree.subtree_end), dtype=torch.float64)
    mask = flex.flex_block_mask(tree.subtree_end, CPU)
    query, key, value = (state.float() for state in states)
    found = flex.flex_attend(query, key, value, mask, 0.25)
    assert distance(found.double(), by_dense(*states, tree.subtree_end, 0.25)) < 1e-5


def test_rows_of_many_lengths_are_compiled_twice() -> None:
    torch._dynamo.utils.counters.clear()
    for tokens in (200, 100, 300, 700, 513, 640, 128):
        states = states_of(6, 2, tokens)
        with torch.no_grad():
            flex.flex_attend(*states, flex.flex_block_mask(np.full(tokens, tokens), CPU), 0.25)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the first length, and every other one


def test_a_policy_learns_the_same_through_flex(
    backward: None, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policies("qwen2", torch.float64)
    rows = as_rows([([0] * 140, [1] * 130), ([0] * 140, [2] * 90), ([0] * 140 + [2] * 90 + [3], [1] * 9)])
    targets = as_targets(rows, 3)
    (row,) = plan(rows, "tree", 4096, policy.shape).rows
    found: dict[str, torch.Tensor] = {}
    names: tuple[AttentionName, ...] = ("flash_pieces", "flex")
    for name in names:
        choice = Choice(name)
        monkeypatch.setattr(attention, "choose", lambda *shape, choice=choice: choice)
        logprobs, _, _ = policy.row_logprobs(row, targets)
        grads = torch.autograd.grad(logprobs.sin().sum(), list(policy.trainable_parameters().values()))
        found[name] = torch.cat([logprobs.detach(), *(grad.flatten() for grad in grads)])
    assert distance(found["flex"], found["flash_pieces"]) < 1e-10


# ---- the choice


def test_a_cpu_takes_the_pieces_for_its_flash_kernel() -> None:
    assert choose(CPU, torch.float32, 14, 2, 64) == Choice("flash_pieces")


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "reason"),
    [
        ("mps", torch.float32, 64, (9, 0), "no backward pass on mps"),
        ("cuda", torch.float64, 64, (9, 0), "no kernel for torch.float64"),
        ("cuda", torch.bfloat16, 8, (9, 0), "heads of 8 channels"),
        ("cuda", torch.bfloat16, 512, (9, 0), "heads of 512 channels"),
        ("cuda", torch.float16, 64, (7, 5), "compute capability 7.5 is below 8.0"),
    ],
)
def test_what_flex_does_not_serve_runs_segment_by_segment_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device, dtype, head_dim, capability, reason
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level(logging.WARNING):
        first, second = (choose(torch.device(device), dtype, 14, 2, head_dim) for _ in range(2))
    assert first == second
    assert first.name == "runs"
    assert reason in str(first.reason)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where CUDA fails")
def test_a_device_on_which_flex_fails_runs_segment_by_segment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with caplog.at_level(logging.WARNING):
        choice = choose(torch.device("cuda"), torch.bfloat16, 14, 2, 64)
    assert choice.name == "runs"
    assert "FlexAttention does not run here" in str(choice.reason)
    assert "CUDA" in caplog.text


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_trial_accepts_a_right_kernel_and_finds_a_wrong_mask(
    backward: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert flex.flex_trial(CPU, dtype, 6, 2, 16) is None
    right = flex.flex_block_mask
    monkeypatch.setattr(
        flex, "flex_block_mask", lambda ends, device: right(np.full_like(ends, len(ends)), device)
    )  # causal
    assert "off by" in str(flex.flex_trial(CPU, torch.bfloat16, 6, 2, 16))


def test_scores_that_an_architecture_changes_are_refused_on_a_tree() -> None:
    tree = forest([([0], [1]), ([0], [2])])
    states = states_of(2, 2, 3)
    context = TreeContext(tree.segments, tree.pieces, tree.subtree_end)
    with pytest.raises(ValueError, match="softcap"):
        tree_attention(torch.nn.Identity(), *states, None, offbook_tree=context, softcap=30.0)


# ---- what it costs


def test_each_attention_is_priced_by_what_it_computes() -> None:
    tree = forest([([0] * 128, [1] * 128), ([0] * 128, [2] * 128)])  # 384 tokens: 128 shared, two branches of 128
    prices = {}
    names: tuple[AttentionName, ...] = ("flash_pieces", "flex", "runs")
    for name in names:
        shape = ModelShape(layers=1, heads=1, head_dim=1, linear=0, lora=0, head=0, call_flops=0.0, attention=name)
        prices[name] = tree_pairs(shape, tree.segments, tree.pieces, tree.subtree_end)
    assert prices["flex"] == FLEX_SLOWDOWN * 5 * 128**2  # three diagonal blocks, and the prompt's for each branch
    assert prices["runs"] == 128**2 + 2 * 128 * 256  # each branch masks its own block
    launching = ModelShape(layers=1, heads=1, head_dim=1, linear=0, lora=0, head=0, call_flops=12.0, attention="runs")
    more = tree_pairs(launching, tree.segments, tree.pieces, tree.subtree_end) - prices["runs"]
    assert more == 3 * RUN_CALLS  # 12 operations a pair: one launch is one pair


def test_a_launch_is_priced_once_for_a_row_under_flex_and_once_for_each_run_without() -> None:
    made: Calls = [([0] * 20, [1 + i % 3, i // 3, 0]) for i in range(9)]
    tree = forest(made)
    costs = {
        name: tree_pairs(
            ModelShape(layers=2, heads=1, head_dim=1, linear=0, lora=0, head=0, call_flops=1e6, attention=name),
            tree.segments,
            tree.pieces,
            tree.subtree_end,
        )
        for name in ("flex", "runs")
    }
    assert costs["flex"] < FLEX_CALLS * 1e6 / 12 * 1.1
    assert costs["runs"] > len(tree.segments) * RUN_CALLS * 1e6 / 12
