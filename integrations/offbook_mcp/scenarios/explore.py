"""Explores a server: calls its tools, and keeps the results."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.errors import McpServerError, McpToolsChangedError
from offbook_mcp.tools.result_values import with_scalars
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .error_texts import NO_ID, NONSENSE, Control, reads_like_error
from .harvest import Leaf, ListedValues, Scalar, is_empty, leaves_of, lists_in
from .sampler import ArgumentSampler, DraftCall, Pick
from .scenario import ReferenceCall, combination
from .slots import Slot


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


_ROUNDS = 4
_CALLS_PER_ROUND = 10
_CALLS_PER_WRITER = 3
_WRITERS_AT_ONCE = 2
_MAX_ROLLOUTS = 4
_TEXT_KEPT = 2_000
_NONE = re.compile(r"(there (are|is) )?(no|none|nothing)\b.{0,80}", re.IGNORECASE)
REFUSED = "a tool reported an error"
REFUSED_AS_TEXT = "a tool answered with an error as ordinary text"
EMPTY = "an answer was empty"


@dataclass(frozen=True)
class Observation:
    """One call and its result. `text` has the rollout's folder replaced, and is cut; `leaves` are its values."""

    tool: str
    arguments: Mapping[str, object] = field(hash=False)
    text: str
    is_error: bool = False
    empty: bool = False
    leaves: tuple[Leaf, ...] = field(default=(), hash=False)

    @property
    def worked(self) -> bool:
        """Whether the result is neither an error nor empty."""
        return not self.is_error and not self.empty


@dataclass
class Exploration:
    """The result of exploring a server. `left_out` has the reason by tool that is not used."""

    sampler: ArgumentSampler
    observations: list[Observation] = field(default_factory=list[Observation])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    controls: dict[str, Control | None] = field(default_factory=dict[str, Control | None])
    """The result of each tool for arguments that match nothing; None if the tool takes no free text."""

    def of(self, tool: str) -> list[Observation]:
        """The observations of one tool."""
        return [observation for observation in self.observations if observation.tool == tool]

    def first_error(self, tool: str) -> str | None:
        """The first call of a tool that was answered with an error, and the error, on one line; without errors, the first
        empty answer; None if every call worked."""
        failed = [observation for observation in self.of(tool) if not observation.worked]
        if not failed:
            return None
        shown = min(failed, key=lambda observation: not observation.is_error)
        text = one_line(shown.text, 160) or "an empty answer"
        return f"{one_line(repr(dict(shown.arguments)), 100)} -> {text}"

    def fault(self, tool: ModelTool, arguments: Mapping[str, object], result: ToolResult) -> str:
        """Why a result is of no use: REFUSED, REFUSED_AS_TEXT, or EMPTY; "" if it is of use.

        A reading tool's result is also empty if it says that there is nothing, or is the same as for nonsense.
        """
        if result.is_error:
            return REFUSED
        control = self.controls.get(tool.name)
        if reads_like_error(tool.name, arguments, result, control):
            return REFUSED_AS_TEXT
        same = control is not None and result.text == control.text
        nothing = is_empty(result) or same or _NONE.fullmatch(result.text.strip()) is not None
        return EMPTY if nothing and tool.tool.kind is ToolKind.READ else ""

    def keep(self, draft: DraftCall, result: ToolResult, *, harvest: bool = True) -> None:
        """Record a result. The sampler learns whether the draft worked, the values that an error lists, and with `harvest`
        the result's values."""
        name = draft.tool.name
        fault = self.fault(draft.tool, draft.arguments, result)
        leaves = () if fault else leaves_of(name, draft.arguments, result)
        self.sampler.learn(draft, not fault)
        if fault:
            self.sampler.add(leaves_of_complaint(draft, result.text))
        if harvest:
            self.sampler.add(leaves)
        refused, empty = fault in (REFUSED, REFUSED_AS_TEXT), fault == EMPTY
        self.observations.append(Observation(name, draft.arguments, result.text[:_TEXT_KEPT], refused, empty, leaves))


async def explore(pool: ServerPool, *, seed: int = 0) -> Exploration:
    """Call the reading tools in several rounds: the results of one round provide arguments for the next.

    Tools that may write are called each in its own rollout. Raises ConfigError when the server keeps failing, McpServerError.
    """
    exploration = Exploration(ArgumentSampler(random.Random(seed)), left_out=dict(pool.toolset.left_out))
    readers = [tool for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ]
    writers = [tool for tool in pool.toolset.tools if tool not in readers]
    await _Reading(pool, exploration).run(readers)
    await _explore_writers(pool, exploration, writers)
    for tool in (*readers, *writers):
        if not exploration.of(tool.name):
            exploration.left_out.setdefault(tool.name, "no arguments are known that its schema accepts")
    return exploration


def withheld_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line per reason, with its tools."""
    tools_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        tools_by_reason[reason].append(one_line(name, 64))
    for reason, names in tools_by_reason.items():
        yield f"not used: {', '.join(names)}: {one_line(reason)}"


async def answered(tools: RolloutTools, tool: str, arguments: Mapping[str, object]) -> ToolResult:
    """Call a tool with `{rollout_dir}` filled in; return the result with the rollout's folder replaced.

    Raises TimeoutError after `Limits.explore_seconds`, and the rollout is of no more use; McpServerError.
    """
    try:
        async with asyncio.timeout(tools.limits.explore_seconds):
            result = await tools.call(tool, tools.with_folder(arguments))
    except TimeoutError:
        tools.give_up(tool)
        raise
    return tools.neutral_result(result)


def too_slow(tools: RolloutTools) -> str:
    """Why a tool that exceeded `Limits.explore_seconds` is left out, and what to do about it."""
    return f"no answer within {tools.limits.explore_seconds:g} s; --call-timeout waits longer"


@dataclass
class _Reading:
    """Explores with the reading tools in one rollout. It continues in another after a server failure, and after a tool that
    does not answer: a server that is stuck in one call may answer no other."""

    pool: ServerPool
    exploration: Exploration
    seen: set[str] = field(default_factory=set[str])
    calling: str = ""

    async def run(self, readers: list[ModelTool]) -> None:
        failures = 0
        while failures < _MAX_ROLLOUTS:
            try:
                async with self.pool.rollout() as tools:
                    if await self._rounds(tools, readers):
                        return
            except McpToolsChangedError:
                raise
            except McpServerError as error:
                if not self.calling:
                    raise
                self.exploration.left_out[self.calling] = f"the server failed: {error}"
                failures += 1
        raise ConfigError(
            f"explore: the server failed {_MAX_ROLLOUTS} times; `--only TOOL` leaves the tools out that end it"
        )

    async def _rounds(self, tools: RolloutTools, readers: list[ModelTool]) -> bool:
        """Whether every tool answered in time; ends at the first that did not."""
        for _ in range(_ROUNDS):
            for tool in readers:
                if tool.name in self.exploration.left_out:
                    continue
                await self._calls(tools, tool)
                if tool.name in self.exploration.left_out:
                    return False
        return True

    async def _calls(self, tools: RolloutTools, tool: ModelTool) -> None:
        self.calling = tool.name
        if tool.name not in self.exploration.controls:
            await _call_with_nonsense(tools, self.exploration, tool)
        for _ in range(_CALLS_PER_ROUND):
            if tool.name in self.exploration.left_out:
                return
            draft = self.exploration.sampler.draw(tool)
            if draft is None:
                return
            key = combination(ReferenceCall(tool=tool.name, arguments=draft.arguments))
            if key not in self.seen:
                self.seen.add(key)
                await self._call(tools, draft)

    async def _call(self, tools: RolloutTools, draft: DraftCall) -> None:
        try:
            result = await answered(tools, draft.tool.name, draft.arguments)
        except TimeoutError:
            self.exploration.left_out[draft.tool.name] = too_slow(tools)
            return
        self.exploration.keep(draft, result)


async def _call_with_nonsense(tools: RolloutTools, exploration: Exploration, tool: ModelTool) -> None:
    """Record the tool's result for arguments that match nothing, to recognise errors and empty results later."""
    exploration.controls[tool.name] = None
    draft = exploration.sampler.draw(tool)
    if draft is None:
        return
    nonsense: dict[object, object] = {(type(pick.value), pick.value): _nonsense(pick) for pick in draft.picks}
    arguments = cast(Schema, with_scalars(draft.arguments, lambda value: nonsense.get((type(value), value), value)))
    if arguments == draft.arguments:
        return
    try:
        text = (await answered(tools, tool.name, arguments)).text
    except TimeoutError:
        exploration.left_out[tool.name] = too_slow(tools)
    else:
        exploration.controls[tool.name] = Control(arguments, text)


def _nonsense(pick: Pick) -> Scalar:
    """A value that matches nothing in place of an open text or an id; others stay, since a huge number may be a duration."""
    if pick.slot.closed:
        return pick.value
    if pick.slot.kind == "string":
        return NONSENSE
    return (
        NO_ID if pick.slot.kind == "integer" and pick.slot.words[-1:] in (("id",), ("isbn",), ("sku",)) else pick.value
    )


async def _explore_writers(pool: ServerPool, exploration: Exploration, writers: list[ModelTool]) -> None:
    """Call every writing tool a few times, each call in its own rollout, to learn which values it accepts."""
    for tool in writers:
        await _in_own_rollout(
            pool, exploration, tool, lambda tools, tool=tool: _call_with_nonsense(tools, exploration, tool)
        )
    for _ in range(_CALLS_PER_WRITER):
        drawn = [exploration.sampler.draw(tool) for tool in writers if tool.name not in exploration.left_out]
        drafts = [draft for draft in drawn if draft is not None]
        for start in range(0, len(drafts), _WRITERS_AT_ONCE):
            await asyncio.gather(
                *(_write(pool, exploration, draft) for draft in drafts[start : start + _WRITERS_AT_ONCE])
            )


async def _write(pool: ServerPool, exploration: Exploration, draft: DraftCall) -> None:
    async def call(tools: RolloutTools) -> None:
        try:
            result = await answered(tools, draft.tool.name, draft.arguments)
        except TimeoutError:
            exploration.left_out[draft.tool.name] = too_slow(tools)
        else:
            exploration.keep(draft, result, harvest=False)

    await _in_own_rollout(pool, exploration, draft.tool, call)


async def _in_own_rollout(
    pool: ServerPool, exploration: Exploration, tool: ModelTool, call: Callable[[RolloutTools], Awaitable[None]]
) -> None:
    """Run `call` in a new rollout. A tool at which the server fails is left out."""
    try:
        async with pool.rollout() as tools:
            await call(tools)
    except McpToolsChangedError:
        raise
    except McpServerError as error:
        exploration.left_out[tool.name] = f"the server failed: {error}"
