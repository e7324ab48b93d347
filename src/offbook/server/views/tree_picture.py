"""Draws the token tree of a group as SVG shapes. The x axis counts tokens; branches are bars, ends of calls are labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .group_tree import Branch, BranchPart, GroupTree
from .numbers import TIMES, fixed, signed

MOST_LEAVES = 200
"""A tree with more leaves is not drawn; the table has its numbers."""


@dataclass(frozen=True)
class TreeRollout:
    """A rollout of the group. `value` is its advantage, or else its reward minus the group's mean."""

    label: str
    url: str
    reward: float | None
    value: float | None


@dataclass(frozen=True)
class TreeBar:
    """A bar with its tooltip (`title`), and a label if there is room."""

    x: float
    y: float
    width: float
    css: str
    title: str
    label: str = ""


@dataclass(frozen=True)
class TreeLeaf:
    """A link at the end of a branch, to the first rollout that ends there."""

    x: float
    y: float
    text: str
    url: str
    rollout: int


@dataclass(frozen=True)
class Picture:
    """The shapes of a drawing. `edges` are SVG paths, each with whether it belongs to the marked rollout."""

    width: int
    height: int
    bars: tuple[TreeBar, ...]
    edges: tuple[tuple[str, bool], ...]
    leaves: tuple[TreeLeaf, ...]


@dataclass(frozen=True)
class _Scale:
    width: int
    row: int
    gap: int
    label: int  # space for the text of a leaf
    prompt: int  # greatest width of a prompt's bar


WIDE = _Scale(width=1180, row=30, gap=18, label=190, prompt=200)
SLIM = _Scale(width=350, row=30, gap=7, label=84, prompt=26)


def picture(
    tree: GroupTree, rollouts: Mapping[int, TreeRollout], scale: _Scale, marked_rollout: int | None = None
) -> Picture | None:
    """Draw a tree; None if it has too many leaves. `marked_rollout` is the number of a rollout to highlight."""
    leaves = tree.leaves
    if len(leaves) > MOST_LEAVES:
        return None
    y = _heights(tree, scale.row)
    per_token = _per_token(tree, scale)
    x = [0.0] * len(tree.branches)
    bars: list[TreeBar] = []
    edges: list[tuple[str, bool]] = []
    ends: list[TreeLeaf] = []
    for number, branch in enumerate(tree.branches):
        left = x[branch.parent] + scale.gap if branch.parent >= 0 else 3.0
        marked = marked_rollout is not None and marked_rollout in branch.rollouts
        if branch.parent >= 0:
            edges.append((_edge(x[branch.parent], y[branch.parent], left, y[number], scale.gap), marked))
        for part in branch.parts:
            width = _width(part, per_token, scale)
            bars.append(_bar(part, branch, rollouts, left, y[number], width, marked))
            left += width
        x[number] = left
        if not branch.children:
            ends.append(_leaf(branch, rollouts, left + 6, y[number], marked_rollout, slim=scale is SLIM))
    return Picture(scale.width, len(leaves) * scale.row + 12, tuple(bars), tuple(edges), tuple(ends))


def _heights(tree: GroupTree, row: int) -> list[float]:
    """The y of each branch: leaves in rows, a parent in the middle of its first and last child."""
    y = [0.0] * len(tree.branches)
    for place, leaf in enumerate(tree.leaves):
        y[leaf] = 6 + row * (place + 0.5)
    for number in range(len(tree.branches) - 1, -1, -1):
        children = tree.branches[number].children
        if children:
            y[number] = (y[children[0]] + y[children[-1]]) / 2
    return y


def _per_token(tree: GroupTree, scale: _Scale) -> float:
    """The width of a token, so that the longest path from a root to a leaf fits."""
    room, longest = [0.0] * len(tree.branches), 1e9
    tokens = [0] * len(tree.branches)
    for number, branch in enumerate(tree.branches):
        fixed_width = sum(scale.prompt for part in branch.parts if part.kind == "prompt")
        above = branch.parent
        room[number] = (room[above] + scale.gap if above >= 0 else 3.0) + fixed_width
        tokens[number] = (tokens[above] if above >= 0 else 0) + sum(
            p.tokens for p in branch.parts if p.kind != "prompt"
        )
        if not branch.children and tokens[number]:
            longest = min(longest, max(20.0, scale.width - scale.label - room[number]) / tokens[number])
    return min(longest, 12.0)


def _width(part: BranchPart, per_token: float, scale: _Scale) -> float:
    if part.kind == "prompt":
        return min(float(scale.prompt), max(4.0, part.tokens * per_token))
    return max(2.0, part.tokens * per_token)


def _edge(x: float, y: float, to_x: float, to_y: float, gap: int) -> str:
    bend = gap * 0.6
    return f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"


def _bar(
    part: BranchPart,
    branch: Branch,
    rollouts: Mapping[int, TreeRollout],
    x: float,
    y: float,
    width: float,
    marked: bool,
) -> TreeBar:
    names = ", ".join(rollouts[number].label for number in branch.rollouts)
    what = {"prompt": "prompt", "sampled": "sampled", "context": "tool result or other context"}[part.kind]
    title = f"{part.tokens} tokens, {what}: {names}"
    here = " here" if marked else ""
    if part.kind != "sampled":
        label = f"prompt, {part.tokens} tokens" if part.kind == "prompt" and width > 130 else ""
        return TreeBar(x, y - 8, width, part.kind + here, title, label)
    values = [rollouts[number].value for number in branch.rollouts]
    text = _listed(values)
    label = text if width > 8 * len(text) else ""
    return TreeBar(x, y - 8, width, _tint(values) + here, f"{title}; above the group: {text}" if text else title, label)


def _tint(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    above, below = any(value > 0.05 for value in known), any(value < -0.05 for value in known)
    return "mixed" if above and below else "above" if above else "below" if below else "even"


def _listed(values: Sequence[float | None]) -> str:
    """The values, each with its count. A mean would hide values that cancel each other."""
    counts: dict[str, int] = {}
    for value in values:
        if value is not None:
            counts[signed(value, 1)] = counts.get(signed(value, 1), 0) + 1
    return ", ".join(f"{text} {TIMES}{count}" if count > 1 else text for text, count in counts.items())


def _leaf(
    branch: Branch, rollouts: Mapping[int, TreeRollout], x: float, y: float, marked_rollout: int | None, *, slim: bool
) -> TreeLeaf:
    numbers = tuple(sorted({call.rollout for call in branch.ending}))
    one = rollouts[numbers[0]]
    marked = marked_rollout is not None and marked_rollout in numbers
    names = ", ".join(rollouts[number].label for number in numbers)
    reward = fixed(one.reward) if len({rollouts[number].reward for number in numbers}) == 1 else "…"
    text = f"{names} {reward}" if slim else f"{names}, reward {reward}"
    limit = 11 if slim else 28
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return TreeLeaf(x, y + 4, f"▸ {text}" if marked else text, one.url, numbers[0])
