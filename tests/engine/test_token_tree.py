"""The token tree against a tree built token by token, and cases counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.base.errors import ConfigError
from offbook.engine.learner.rows.cost import Kind, cut
from offbook.engine.protocol import Sample
from offbook.engine.token_tree import build_tree, numbered


def row(prompt: list[int], completion: list[int], offset: int = 0) -> Sample:
    return Sample.bare(np.array(prompt, np.int32), np.array(completion, np.int32), offset)


tokens = st.lists(st.integers(0, 2), max_size=8)
forests = st.lists(st.tuples(tokens.filter(bool), tokens), min_size=1, max_size=9)


def as_rows(calls: list[tuple[list[int], list[int]]]) -> list[Sample]:
    offsets = np.cumsum([0, *(len(completion) for _, completion in calls)])
    return [row(p, c, int(offset)) for (p, c), offset in zip(calls, offsets[:-1], strict=True)]


def path(tree, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    found: list[int] = []
    while node >= 0:
        found.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return tuple(found[::-1])


@settings(deadline=None)
@given(calls=forests)
def test_a_tree_holds_each_distinct_prefix_once_and_each_target_where_it_was_sampled(calls) -> None:
    tree = build_tree(as_rows(calls))
    prefixes = {tuple((p + c)[:n]) for p, c in calls for n in range(1, len(p + c) + 1)}
    paths = [path(tree, node) for node in range(len(tree))]
    assert sorted(paths) == sorted(prefixes)
    assert tree.positions.tolist() == [len(prefix) - 1 for prefix in paths]
    expected = [tuple(p + c[: j + 1]) for p, c in calls for j in range(len(c))]
    assert tree.target_number.tolist() == list(range(len(expected)))
    assert [paths[node] for node in tree.target_node] == expected
    assert [paths[node] for node in tree.target_predictor] == [prefix[:-1] for prefix in expected]


@settings(deadline=None)
@given(calls=forests)
def test_a_token_sees_its_prefix_and_nothing_else(calls) -> None:
    tree = build_tree(as_rows(calls))
    paths = [path(tree, node) for node in range(len(tree))]
    for q, whole in enumerate(paths):
        seen = {paths[k] for k in range(len(tree)) if k <= q < tree.subtree_end[k]}
        assert seen == {whole[:n] for n in range(1, len(whole) + 1)}


@settings(deadline=None)
@given(calls=forests, call_pairs=st.sampled_from([0.0, 5.0, 50.0, 1e9]))
def test_attention_pieces_cover_what_each_token_sees_exactly_once(calls, call_pairs: float) -> None:
    tree = build_tree(as_rows(calls))
    count = len(tree)
    at = np.arange(count)
    visible = (at[None] <= at[:, None]) & (at[:, None] < tree.subtree_end[None])
    covered = np.zeros((count, count), int)
    own = np.zeros(count, int)
    for piece in cut(tree.segments(), call_pairs):
        q, k = slice(*piece.query), slice(*piece.key)
        if piece.kind is Kind.ABOVE:
            covered[q, k] += 1
            continue
        own[q] += 1
        length = (piece.query[1] - piece.query[0]) // piece.batch
        for start in range(piece.query[0], piece.query[1], length):
            run = slice(start, start + length)
            causal = np.tril(np.ones((length, length), int))
            covered[run, run] += causal if piece.kind is Kind.CAUSAL else visible[run, run]
    assert own.tolist() == [1] * count
    assert np.array_equal(covered, visible.astype(int))


def test_segments_are_the_unbranched_runs() -> None:
    tree = build_tree(
        [row([1, 2, 3], [4, 5]), row([1, 2, 3, 4, 5], [6], 2), row([1, 2, 3], [7, 8], 3), row([9], [1], 5)]
    )
    runs = tree.segments()
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    assert runs.start.tolist() == [0, 3, 6, 8]
    assert runs.end.tolist() == [3, 6, 8, 10]
    assert runs.subtree_end.tolist() == [8, 6, 8, 10]
    assert runs.parent.tolist() == [-1, 0, 0, -1]
    assert runs.depth.tolist() == [0, 3, 3, 0]


def test_interleaved_sub_agents_give_two_branches_and_not_six_rows() -> None:
    """Two agents of three turns: a prompt of 50, then 5 sampled tokens a turn with 8 of a tool between: 55, 68, 81."""
    context = {agent: np.arange(50) + 1000 * agent for agent in range(2)}
    fresh = iter(range(5000, 6000))
    rows: list[Sample] = []
    for turn in range(3):
        for agent in range(2):  # the order of the calls: A1 B1 A2 B2 A3 B3
            tool = [next(fresh) for _ in range(8)] if turn else []
            prompt = np.concatenate([context[agent], tool]).astype(np.int32)
            completion = np.array([next(fresh) for _ in range(5)], np.int32)
            rows.append(Sample.bare(prompt, completion, 5 * len(rows)))
            context[agent] = np.concatenate([prompt, completion])
    tree = build_tree(rows)
    assert len(tree.leaves) == len(tree.segments()) == 2
    assert len(tree) == 162
    assert sum(call.length for call in rows) == 408


def test_a_completion_sampled_twice_is_computed_once_and_trained_twice() -> None:
    tree = build_tree([row([1, 2], [3, 4], 0), row([1, 2], [3, 4], 2)])
    assert len(tree) == 4
    assert tree.target_number.tolist() == [0, 1, 2, 3]
    assert tree.target_node.tolist() == [2, 3, 2, 3]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="call 1: the prompt is empty"):
        build_tree([row([1], [2]), row([], [3], 1)])


def test_the_example_of_the_architecture_page() -> None:
    first = row([5, 6, 7], [8, 9])
    alone = build_tree(numbered([first]))
    assert (alone.target_node.tolist(), alone.target_predictor.tolist(), len(alone)) == ([3, 4], [2, 3], 5)
    both = build_tree(numbered([first, row([5, 6, 7, 8, 9, 10], [11])]))
    assert (both.target_node.tolist(), both.target_predictor.tolist(), len(both)) == ([3, 4, 6], [2, 3, 5], 7)
