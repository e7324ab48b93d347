"""Explores a server: calls its tools, and keeps the results."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from offbook.base.text import one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.tools.result_values import with_scalars
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .execution import NO_ID, NONSENSE, SERVER_FAILED, Control, Executor, Exploration, ReferenceRun
from .harvest import Leaf, ListedValues, Scalar, lists_in
from .sampler import ArgumentSampler, DraftCall, Pick, Slot
from .scenario import combination

_ROUNDS = 4
_CALLS_PER_ROUND = 10
_CALLS_PER_WRITER = 3
_TEXT_KEPT = 2_000


async def explore(pool: ServerPool, *, seed: int = 0) -> Exploration:
    """Call the reading tools in several rounds: the results of one call provide arguments for the next.

    Tools that may write are called each in its own rollout. Raises McpServerError for a server that cannot be started again.
    """
    exploration = Exploration(ArgumentSampler(random.Random(seed)), left_out=dict(pool.toolset.left_out))
    executor = Executor(pool, exploration.controls)
    readers = [tool for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ]
    writers = [tool for tool in pool.toolset.tools if tool not in readers]
    await executor.in_order(_drafts(exploration, readers), partial(note, exploration, harvest=True))
    for _ in range(1 + _CALLS_PER_WRITER):
        left = [tool for tool in writers if tool.name not in exploration.left_out]
        drafts = [draft for tool in left if (draft := _next_draft(exploration, tool)) is not None]
        for draft, run in zip(drafts, await executor.run(drafts), strict=True):
            note(exploration, draft, run, harvest=False)
    for tool in (*readers, *writers):
        if not exploration.of(tool.name):
            exploration.left_out.setdefault(tool.name, "no arguments are known that its schema accepts")
    return exploration


def _drafts(exploration: Exploration, tools: list[ModelTool]) -> Iterator[DraftCall]:
    """New calls of the tools in turn, each drawn after the one before it was noted."""
    seen: set[str] = set()
    for _ in range(_ROUNDS):
        for tool in tools:
            for _ in range(_CALLS_PER_ROUND):
                draft = _next_draft(exploration, tool) if tool.name not in exploration.left_out else None
                if draft is None:
                    break
                if (key := combination(draft.calls[0])) not in seen:
                    seen.add(key)
                    yield draft


def _next_draft(exploration: Exploration, tool: ModelTool) -> DraftCall | None:
    """A call of the tool; the first one with arguments that match nothing, to recognise errors and empty results later."""
    draft = exploration.sampler.draw(tool)
    if draft is None or tool.name in exploration.controls:
        return draft
    nonsense: dict[object, object] = {(type(pick.value), pick.value): _nonsense(pick) for pick in draft.picks}
    arguments = cast(Schema, with_scalars(draft.arguments, lambda value: nonsense.get((type(value), value), value)))
    if arguments == draft.arguments:
        exploration.controls[tool.name] = None
        return draft
    return DraftCall(tool, arguments, ())


def note(exploration: Exploration, draft: DraftCall, run: ReferenceRun, *, harvest: bool) -> None:
    """Record a result. The sampler learns whether the draft worked, the values that an error lists, and with `harvest` the
    result's values. A tool that does not answer, or at which the server fails, is left out."""
    name, sampler = draft.tool.name, exploration.sampler
    if not run.answers:
        failed = run.fault == SERVER_FAILED
        exploration.left_out[name] = f"{run.fault}: {run.example}" if failed else run.fault
        return
    [answer] = run.answers
    if name not in exploration.controls:
        exploration.controls[name] = Control(draft.arguments, answer.text)
        return
    sampler.learn(draft, answer.worked)
    if answer.fault:
        sampler.add(leaves_of_complaint(draft, answer.text))
    if harvest:
        sampler.add(answer.leaves)
    exploration.observations.append(replace(answer, text=answer.text[:_TEXT_KEPT]))


def leaves_of_complaint(draft: DraftCall, text: str) -> Iterator[Leaf]:
    """The values listed in the error message of a drawn call, such as `unknown table 'x'; tables: users, orders`.

    They belong to the argument that the list's label names, else to the one whose value the message repeats, else to the
    call's only open text; else they keep the words of the label.
    """
    picks = [pick for pick in draft.picks if pick.slot.kind == "string" and not pick.slot.closed]
    drawn = {pick.value for pick in picks}
    open_slots = {pick.slot.key: pick.slot for pick in picks}
    blamed = {
        pick.slot.key: pick.slot for pick in picks if re.search(rf"(?<!\w){re.escape(str(pick.value))}(?!\w)", text)
    }
    for listed in lists_in(text):
        words = _words(listed, open_slots, blamed)
        for value in listed.values:
            if words and value not in drawn:
                yield Leaf(value, f"{draft.tool.name}: error {' '.join(words)}", words)


def _words(listed: ListedValues, open_slots: dict[str, Slot], blamed: dict[str, Slot]) -> tuple[str, ...]:
    named = {key: slot for key, slot in open_slots.items() if listed.label and slot.words[-1:] == listed.label[-1:]}
    for slots in (named, blamed, open_slots):
        if len(slots) == 1:
            return next(iter(slots.values())).words
    return listed.label


def withheld_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line per reason, with its tools."""
    tools_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        tools_by_reason[reason].append(one_line(name, 64))
    for reason, names in tools_by_reason.items():
        yield f"not used: {', '.join(names)}: {one_line(reason)}"


def _nonsense(pick: Pick) -> Scalar:
    """A value that matches nothing in place of an open text or an id; others stay, since a huge number may be a duration."""
    if pick.slot.closed:
        return pick.value
    if pick.slot.kind == "string":
        return NONSENSE
    return (
        NO_ID if pick.slot.kind == "integer" and pick.slot.words[-1:] in (("id",), ("isbn",), ("sku",)) else pick.value
    )
