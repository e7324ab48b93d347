"""Sliding windows on a tree: every attention follows the dense mask, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from offbook.engine.learner.model import attention as flex
from offbook.engine.learner.model.attention import NO_MASK, TreeContext, tree_attention
from offbook.engine.learner.rows.cost import AttentionName
from offbook.engine.learner.rows.layouts import Forest
from tests.engine.learner.test_flex import CPU, answers, dense, forest, states_of
from tests.engine.learner.test_layouts import Calls, calls

SLOW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def windowed(row: Forest, window: int) -> np.ndarray:
    """Token q sees its ancestor k iff it is less than `window` deeper; bool [q, k]."""
    depth = row.segments.positions
    return dense(row.subtree_end) & (depth[:, None] - depth[None] < window)


@pytest.mark.parametrize("name", ["runs", "flash_pieces", "flex"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@SLOW
@given(made=calls(), window=st.integers(1, 40))
def test_a_layer_with_a_window_equals_dense_attention_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, name: AttentionName, made: Calls, window: int
) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *states: None)  # flex' backward pass from a CPU tensor
    row = forest(made, stretch=3)
    torch.manual_seed(0)
    states = states_of(6, 2, len(row.subtree_end), requires_grad=True)
    tree = TreeContext(row.segments, row.pieces, row.subtree_end, attention=name)
    layer = torch.nn.Identity()
    out, _ = tree_attention(layer, *states, NO_MASK, 0.3, offbook_tree=tree, sliding_window=window)
    query, key, value = states
    key, value = (part.repeat_interleave(3, 1) for part in (key, value))
    mask = torch.from_numpy(windowed(row, window))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(answers(out, states), answers(expected, states), rtol=0, atol=2e-5)


def test_a_window_that_hides_no_ancestor_costs_nothing() -> None:
    row = forest([([1, 2, 3], [1, 2]), ([1, 2, 3], [2])])
    tree = TreeContext(row.segments, row.pieces, row.subtree_end)
    assert (tree.cut_off(None), tree.cut_off(5), tree.cut_off(4)) == (None, None, 4)
    assert tree.flex_mask(CPU) is tree.flex_mask(CPU)


def test_a_real_mask_beside_a_tree_is_an_error() -> None:
    row = forest([([1, 2, 3], [1, 2])])
    tree = TreeContext(row.segments, row.pieces, row.subtree_end)
    states = states_of(2, 2, len(row.subtree_end))
    with pytest.raises(ValueError, match="the tree is the mask"):
        tree_attention(torch.nn.Identity(), *states, torch.ones(1, 1, 5, 5, dtype=torch.bool), offbook_tree=tree)
    assert flex.flex_block_mask(row.subtree_end, CPU).shape[-1] == 256
