"""Plans of tasks: one call, several independent calls, a call that uses another's result, or a write and a read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from offbook_mcp.tools.tool import ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .explore import Exploration, Observation
from .harvest import SHORT, Leaf
from .sampler import DraftCall, Pick
from .scenario import ReferenceCall

_TRIES = 6


class PlanKind(StrEnum):
    """How the calls of a plan depend on each other."""

    SINGLE = "single"  # one call
    SEVERAL = "several"  # independent calls
    FLOW = "flow"  # an argument of the second call is in the first call's result, and not in the task
    EFFECT = "effect"  # the second call reads what the first one wrote


@dataclass(frozen=True)
class ValueLink:
    """An argument that the task does not contain, but the previous result does.

    `words` describe the value in that result. `first` means that it is the first of several such values.
    """

    pick: Pick
    words: tuple[str, ...]
    first: bool


@dataclass(frozen=True)
class Plan:
    """The calls of a task, in order."""

    kind: PlanKind
    drafts: tuple[DraftCall, ...] = field(hash=False)
    link: ValueLink | None = field(default=None, hash=False)

    @property
    def calls(self) -> tuple[ReferenceCall, ...]:
        """The calls in the form of a scenario."""
        return tuple(ReferenceCall(tool=draft.tool.name, arguments=draft.arguments) for draft in self.drafts)

    @property
    def writes(self) -> bool:
        """Whether a call may change something."""
        return any(draft.tool.tool.kind is not ToolKind.READ for draft in self.drafts)

    @property
    def difficulty(self) -> int:
        """1: one value. 2: several values. 3: two calls, or nested values. 4: calls that depend on each other. 5: three."""
        if len(self.drafts) > 2:
            return 5
        if self.kind in (PlanKind.FLOW, PlanKind.EFFECT):
            return 4
        if self.kind is PlanKind.SEVERAL:
            return 3
        values = sum(len(draft.picks) for draft in self.drafts)
        return 1 if values < 2 else 2 if values < 5 else 3


class Planner:
    """Draws plans from an exploration."""

    def __init__(self, exploration: Exploration, tools: Sequence[ModelTool], rng: random.Random) -> None:
        self.exploration = exploration
        self.tools = [tool for tool in tools if tool.name not in exploration.left_out]
        self.readers = [tool for tool in self.tools if tool.tool.kind is ToolKind.READ]
        self._rng = rng

    def plan(self, tool: ModelTool, most_difficult: int) -> Plan | None:
        """Draw a plan that uses this tool; None if the drawn plan is too difficult."""
        kinds = [self._single, partial(self._sequence, 2), partial(self._sequence, 3), self._flow, self._effect]
        weights = [11, 3 * (most_difficult > 2), most_difficult > 4, 3 * (most_difficult > 3), 3 * (most_difficult > 3)]
        plan = self._rng.choices(kinds, [float(weight) for weight in weights])[0](tool)
        plan = plan or self._single(tool)
        return plan if plan is not None and plan.difficulty <= most_difficult else None

    def _single(self, tool: ModelTool) -> Plan | None:
        draft = self._draw(tool)
        return None if draft is None else Plan(PlanKind.SINGLE, (draft,))

    def _sequence(self, length: int, tool: ModelTool) -> Plan | None:
        """Distinct calls with arguments, of this tool and other reading tools; None if the draw has none."""
        if tool.tool.kind is not ToolKind.READ:
            return None
        tools = [tool, *(self._rng.choice(self.readers) for _ in range(length - 1))]
        self._rng.shuffle(tools)
        drafts = [draft for drawn_tool in tools if (draft := self._draw(drawn_tool)) is not None]
        distinct = {repr((draft.tool.name, draft.arguments)) for draft in drafts}
        if len(distinct) < length or sum(not draft.arguments for draft in drafts) > 0:
            return None
        return Plan(PlanKind.SEVERAL, tuple(drafts))

    def _flow(self, tool: ModelTool) -> Plan | None:
        """A call with an argument from another tool's result, after the call that returns this result."""
        for _ in range(_TRIES):
            draft = self._draw(tool)
            if draft is None:
                return None
            for pick in draft.picks:
                leaf = pick.leaf
                if (
                    leaf is None
                    or leaf.place.endswith(SHORT)
                    or not self.exploration.sampler.worked(pick.slot, pick.source)
                ):
                    continue
                if sum(other.slot.argument == pick.slot.argument for other in draft.picks) > 1:
                    continue
                first = self._first_call(leaf, draft)
                if first is not None:
                    observation, is_first = first
                    reader = next(other for other in self.readers if other.name == observation.tool)
                    link = ValueLink(pick, leaf.words, is_first)
                    return Plan(PlanKind.FLOW, (DraftCall(reader, observation.arguments, ()), draft), link)
        return None

    def _first_call(self, leaf: Leaf, draft: DraftCall) -> tuple[Observation, bool] | None:
        """An observed call whose result has this value first in its place, and whether the place has further values."""
        tool = leaf.place.split(":")[0]
        if (
            tool == draft.tool.name
            or tool not in {reader.name for reader in self.readers}
            or leaf.place.endswith(": lines")
        ):
            return None
        choices: list[tuple[Observation, bool]] = []
        for observation in self.exploration.of(tool):
            values = [other.value for other in observation.leaves if other.place == leaf.place]
            if observation.worked and values and values[0] == leaf.value:
                choices.append((observation, len(set(values)) > 1))
        return self._rng.choice(choices) if choices else None

    def _effect(self, tool: ModelTool) -> Plan | None:
        """A writing call, and a second call with the same values: a reading one, or sometimes another writing one."""
        writers = [candidate for candidate in self.tools if candidate.tool.kind is not ToolKind.READ]
        if not writers or not self.readers:
            return None
        writer = tool if tool in writers else self._rng.choice(writers)
        for _ in range(_TRIES):
            first = self._draw(writer)
            if first is None:
                return None
            near = tuple(Leaf(pick.value, f"{writer.name}: {pick.slot.path}", pick.slot.words) for pick in first.picks)
            others = (
                self.readers
                if self._rng.random() < 0.7 or len(writers) < 2
                else [w for w in writers if w is not writer]
            )
            reader = self._rng.choice(others) if tool is writer else tool
            second = self.exploration.sampler.draw(reader, near)
            if second is None:
                continue
            if any(pick.leaf in near for pick in second.picks) or (not second.picks and self._rng.random() < 0.3):
                return Plan(PlanKind.EFFECT, (first, second))
            if tool is not writer and not second.picks:
                return None
        return None

    def _draw(self, tool: ModelTool) -> DraftCall | None:
        return self.exploration.sampler.draw(tool)
