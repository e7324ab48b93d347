"""Builds the token tree of a group from its recorded calls: which tokens its rollouts share, and where they diverge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from offbook.base.types import Call
from offbook.engine.protocol import Sample
from offbook.engine.token_tree import build_tree, numbered

Kind = Literal["prompt", "sampled", "context"]

MOST_TOKENS = 3_000_000
"""Most tokens of all calls of a group; a larger group gets no tree."""


@dataclass(frozen=True)
class TreeCall:
    """A choice of a call, with the numbers of its prompt tokens and sampled tokens."""

    rollout: int  # number of the rollout in the group
    number: int  # number of the call in the rollout
    call_id: str
    index: int
    prompt: int
    tokens: int

    @property
    def end(self) -> int:
        """Number of tokens of prompt and answer."""
        return self.prompt + self.tokens


@dataclass(frozen=True)
class BranchPart:
    """Consecutive tokens of one kind in a branch."""

    kind: Kind
    tokens: int


@dataclass(frozen=True)
class Branch:
    """Consecutive tokens without a fork."""

    parent: int  # number of the branch before; -1 at a root
    children: tuple[int, ...]  # numbers of the branches after
    tokens: int
    parts: tuple[BranchPart, ...]
    calls: tuple[TreeCall, ...]  # calls that contain these tokens
    ending: tuple[TreeCall, ...]  # calls whose last token is in this branch

    @property
    def rollouts(self) -> tuple[int, ...]:
        """Numbers of the rollouts whose calls contain these tokens."""
        return tuple(sorted({call.rollout for call in self.calls}))


@dataclass(frozen=True)
class GroupTree:
    """The branches of a group in depth-first order.

    `once` is the number of tokens in the tree, where shared tokens count once. `rows` is the number of tokens without
    sharing, in one row per call.
    """

    branches: tuple[Branch, ...]
    once: int
    rows: int

    @property
    def roots(self) -> tuple[int, ...]:
        """Numbers of the branches without a parent."""
        return tuple(number for number, branch in enumerate(self.branches) if branch.parent < 0)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Numbers of the branches without children."""
        return tuple(number for number, branch in enumerate(self.branches) if not branch.children)

    def depth(self, number: int) -> int:
        """Number of tokens before a branch."""
        above, parent = 0, self.branches[number].parent
        while parent >= 0:
            above += self.branches[parent].tokens
            parent = self.branches[parent].parent
        return above

    def shared(self, rollout: int) -> int:
        """Number of a rollout's tokens that other rollouts of the group have too."""
        return sum(b.tokens for b in self.branches if rollout in b.rollouts and len(b.rollouts) > 1)

    def own(self, rollout: int) -> int:
        """Number of a rollout's tokens that no other rollout of the group has."""
        return sum(b.tokens for b in self.branches if b.rollouts == (rollout,))


def group_tree(rollouts: Mapping[int, Sequence[Call]]) -> GroupTree | None:
    """The tree of the usable calls of a group; None without such calls, or with more than `MOST_TOKENS` tokens.

    `rollouts`: number of the rollout -> its calls.
    """
    calls: list[TreeCall] = []
    samples: list[Sample] = []
    for rollout, of_rollout in rollouts.items():
        for number, call in enumerate(of_rollout, 1):
            for output in call.outputs:
                if not (output.status.usable and output.token_ids and call.prompt_ids):
                    continue
                size = len(call.prompt_ids), len(output.token_ids)
                calls.append(TreeCall(rollout, number, call.id, output.index, *size))
                ids = np.asarray(call.prompt_ids, np.int32), np.asarray(output.token_ids, np.int32)
                samples.append(Sample.bare(*ids))
    rows = sum(call.end for call in calls)
    if not calls or rows > MOST_TOKENS:
        return None
    ordered = numbered(samples)
    tree = build_tree(ordered)
    segments = tree.segments()
    last_nodes = [tree.target_node[sample.offset + len(sample.completion_ids) - 1] for sample in ordered]
    ends: list[int] = (np.searchsorted(segments.start, last_nodes, "right") - 1).tolist()
    parents: list[int] = segments.parent.tolist()
    passing: dict[int, list[TreeCall]] = defaultdict(list)
    ending: dict[int, list[TreeCall]] = defaultdict(list)
    for call, end in zip(calls, ends, strict=True):
        ending[end].append(call)
        while end >= 0:
            passing[end].append(call)
            end = parents[end]
    children: dict[int, list[int]] = defaultdict(list)
    for number, parent in enumerate(parents):
        children[parent].append(number)
    branches = tuple(
        Branch(
            parent=parents[number],
            children=tuple(children[number]),
            tokens=size,
            parts=_parts(depth, size, passing[number]),
            calls=tuple(passing[number]),
            ending=tuple(ending[number]),
        )
        for number, (depth, size) in enumerate(
            zip(segments.depth.tolist(), (segments.end - segments.start).tolist(), strict=True)
        )
    )
    return GroupTree(branches, len(tree), rows)


def _parts(depth: int, size: int, calls: Sequence[TreeCall]) -> tuple[BranchPart, ...]:
    """Split the tokens `depth` to `depth + size` by kind.

    Tokens that any call sampled are "sampled", those before every sampled token "prompt", all others "context".
    """
    end = depth + size
    first = min(call.prompt for call in calls)
    edges = {depth, end} | {edge for call in calls for edge in (call.prompt, call.end) if depth < edge < end}
    cuts = sorted(edges)
    parts: list[BranchPart] = []
    for start, stop in pairwise(cuts):
        sampled = any(call.prompt <= start < call.end for call in calls)
        kind: Kind = "sampled" if sampled else "prompt" if start < first else "context"
        if parts and parts[-1].kind == kind:
            parts[-1] = replace(parts[-1], tokens=parts[-1].tokens + stop - start)
        else:
            parts.append(BranchPart(kind, stop - start))
    return tuple(parts)
