"""Runs the reference calls of candidates in new rollouts, chooses what a final answer must contain, and keeps the valid ones."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from offbook.base.text import counted, one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.errors import McpServerError, McpStartError, McpToolsChangedError
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult
from offbook_mcp.tools.tool import ToolKind
from offbook_mcp.training.argument_score import result_digest

from .explore import Exploration, answered, too_slow
from .harvest import Leaf, comma_list, is_dated, leaves_of, strings_of
from .scenario import (
    CheckKind,
    McpScenario,
    ReferenceCall,
    ScenarioSet,
    combination,
    normalised,
    number_held_out,
    select,
    split_scenarios,
)
from .wording import is_short

_MAX_LISTED = 5
_LONGEST_LINE = 48
_NUMBER = re.compile(r"(?<![\w.,:/-])-?\d+(?:\.\d+)?(?![\w.]*\w|[,:/-]\w)")
"""A number that stands alone: no part of a date, a time, a version or an id."""


@dataclass(frozen=True)
class Answered:
    """A call with its result, in which the rollout's folder is replaced by its placeholder.

    `digest` is a hash of the whole result if the call has arguments in a language, such as SQL; else "".
    """

    tool: str
    arguments: Mapping[str, object]
    result: ToolResult
    digest: str = ""

    @property
    def text(self) -> str:
        return self.result.text


@dataclass(frozen=True)
class Expected:
    """Values that a final answer must contain. `ask` is the name by which the task asks for them; "" if it need not."""

    values: tuple[str, ...]
    ask: str = ""


def expected(first: Answered, second: Answered, rng: random.Random) -> Expected | None:
    """The values of a call's result that the final answer must contain, from two runs of the call.

    None if the result depends on the current time, or has no value that the task does not contain.
    """
    if is_dated(first.text) or is_dated(second.text):
        return None
    again = {(leaf.place, leaf.value) for leaf in _leaves(second)}
    leaves = [leaf for leaf in _leaves(first) if (leaf.place, leaf.value) in again and not isinstance(leaf.value, bool)]
    if first.text == second.text and "\n" not in first.text.strip() and (line := _line(first)) is not None:
        return line
    if named := _named(leaves, first):
        leaf = rng.choice(named)
        return Expected((_shown(leaf),), _name_in_result(leaf))
    listed = _listed(leaves)
    if first.text == second.text and listed:
        return Expected(tuple(_shown(leaf) for leaf in listed))
    return None


def _leaves(answered: Answered) -> tuple[Leaf, ...]:
    return leaves_of(answered.tool, answered.arguments, answered.result)


def _named(leaves: Sequence[Leaf], answered: Answered) -> list[Leaf]:
    places = Counter(leaf.place for leaf in leaves)
    names = Counter(leaf.words for leaf in leaves)
    return [
        leaf
        for leaf in leaves
        if places[leaf.place] == names[leaf.words] == 1
        and not leaf.place.endswith(("lines", "list", "]", "}"))
        and leaf.words[-1] not in answered.tool.split("_")
        and not leaf.words[-1].isdigit()
        and len(_shown(leaf)) > 1
    ]


def _name_in_result(leaf: Leaf) -> str:
    """The name of a value in its result, as written there: `address.postal_codes` is "address postal codes"."""
    path = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", leaf.place.partition(": ")[2]).lower()
    words = re.findall(r"[^\W\d_]+|\d+", path)[-len(leaf.words) :]
    return " ".join(dict.fromkeys(words if len(words) == len(leaf.words) else leaf.words))


def _listed(leaves: list[Leaf]) -> list[Leaf]:
    values = {leaf.value for leaf in leaves}
    same = len({leaf.place.replace("[FILE]", "[DIR]") for leaf in leaves}) == 1
    return leaves if same and len(leaves) == len(values) <= _MAX_LISTED else []


def _line(answered: Answered) -> Expected | None:
    """Of a short sentence, the numbers that are not in the arguments; else the whole sentence."""
    text = answered.text.strip()
    if not text or text.endswith(":") or answered.result.values is not None:
        return None
    known = {match for text_in_call in strings_of(answered.arguments) for match in _NUMBER.findall(text_in_call)}
    known |= {json.dumps(value) for value in answered.arguments.values() if isinstance(value, int | float)}
    numbers = [number for number in dict.fromkeys(_NUMBER.findall(text)) if number not in known]
    if 1 <= len(numbers) <= 2:
        return Expected(tuple(numbers))
    repeated = any(text in text_in_call for text_in_call in strings_of(answered.arguments))
    if len(comma_list(text)) > 1:
        return None
    return Expected((text,)) if len(text) <= _LONGEST_LINE and not repeated and "{" not in text else None


def _shown(leaf: Leaf) -> str:
    return leaf.value if isinstance(leaf.value, str) else json.dumps(leaf.value)


APART_SECONDS = 1.2
"""Pause between the two runs: a tool that returns the time in whole seconds must give different results."""
SERVER_FAILED = "the server failed"
_AT_ONCE = 2


class Runnable(Protocol):
    """Something with reference calls: a plan or a written scenario."""

    @property
    def calls(self) -> tuple[ReferenceCall, ...]: ...


@dataclass(frozen=True)
class ReferenceRun:
    """The results of reference calls.

    `fault` is why they cannot become a scenario, and `example` the call and the answer that show it; "" if they can.
    """

    answers: tuple[Answered, ...] = field(default=(), hash=False)
    fault: str = ""
    example: str = ""


def with_results(
    calls: Sequence[ReferenceCall], first: ReferenceRun, second: ReferenceRun
) -> tuple[ReferenceCall, ...]:
    """The calls with the hashes of their results, where both runs have the same and it will not depend on the date."""
    return tuple(
        call.model_copy(update={"returned": one.digest})
        if one.digest == other.digest and not is_dated(one.text)
        else call
        for call, one, other in zip(calls, first.answers, second.answers, strict=True)
    )


class Executor:
    """Runs reference calls. Plans that only read share a rollout; every other plan gets a new one."""

    def __init__(self, pool: ServerPool, exploration: Exploration) -> None:
        self._pool = pool
        self._exploration = exploration
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.ended = 0.0
        self._reading = {tool.name for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ}

    def writes(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether a call may change something."""
        return any(call.tool not in self._reading for call in calls)

    async def run(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan once; the results are in the order of the plans."""
        runs: dict[int, ReferenceRun] = {}
        reading = [number for number, plan in enumerate(plans) if not self.writes(plan.calls)]
        writing = [number for number, plan in enumerate(plans) if self.writes(plan.calls)]

        async def alone(number: int) -> None:
            async with self._slots:
                runs[number] = await self._in_rollout(lambda tools: self._calls(tools, plans[number].calls))

        await asyncio.gather(self._reading_runs(plans, reading, runs), *(alone(number) for number in writing))
        self.ended = time.monotonic()
        return [runs[number] for number in range(len(plans))]

    async def again(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan a second time, at least APART_SECONDS after the first."""
        await asyncio.sleep(max(0.0, self.ended + APART_SECONDS - time.monotonic()))
        return await self.run(plans)

    async def _reading_runs(self, plans: Sequence[Runnable], numbers: list[int], runs: dict[int, ReferenceRun]) -> None:
        """Run the plans in one rollout. After a server failure, or a call without an answer, continue in a new one."""
        waiting = list(numbers)

        async def all_of(tools: RolloutTools) -> ReferenceRun:
            while waiting:
                number = waiting[0]
                runs[number] = ReferenceRun(fault=SERVER_FAILED)
                runs[number] = await self._calls(tools, plans[number].calls)
                waiting.pop(0)
                if runs[number].fault == too_slow(tools):
                    break
            return ReferenceRun()

        while waiting:
            before = len(waiting)
            ended = await self._in_rollout(all_of)
            if ended.fault and waiting:
                number = waiting.pop(0)
                runs[number] = ended
            elif len(waiting) == before:
                return

    async def _in_rollout(self, work: Callable[[RolloutTools], Awaitable[ReferenceRun]]) -> ReferenceRun:
        try:
            async with self._pool.rollout() as tools:
                return await work(tools)
        except (McpStartError, McpToolsChangedError):
            raise  # all later plans would fail too
        except McpServerError:
            return ReferenceRun(fault=SERVER_FAILED)

    async def _calls(self, tools: RolloutTools, calls: Sequence[ReferenceCall]) -> ReferenceRun:
        answers: list[Answered] = []
        for call in calls:
            try:
                result = await answered(tools, call.tool, call.arguments)
            except TimeoutError:
                return ReferenceRun(fault=too_slow(tools))
            tool = self._pool.toolset.find(call.tool)
            if tool is not None and (fault := self._exploration.fault(tool, call.arguments, result)):
                return ReferenceRun(
                    fault=fault, example=f"{call.tool}: {result.text}" if result.text.strip() else call.tool
                )
            digest = result_digest(tools, tool, result) if tool is not None and not tool.tool.open_world else ""
            answers.append(Answered(call.tool, call.arguments, result, digest))
        return ReferenceRun(tuple(answers))


Progress = Callable[[str], None]


@dataclass
class ScenarioGeneration:
    """The state of one `generate_scenarios` call."""

    pool: ServerPool
    exploration: Exploration
    count: int
    seed: int
    max_difficulty: int
    progress: Progress
    valid: list[McpScenario] = field(default_factory=list[McpScenario])
    dropped: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """By reason of `dropped`: what a tool answered, on one line."""
    _known: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.executor = Executor(self.pool, self.exploration)

    def is_new(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether no earlier candidate has the same calls in any order. Registers these calls."""
        return self._first_time("\n".join(sorted(combination(call) for call in calls)), "the same calls as another")

    def drop(self, run: ReferenceRun) -> bool:
        """Whether a run has a fault. Counts it as dropped, with its first example."""
        if run.fault:
            self.dropped[run.fault] += 1
            if run.example:
                self.examples.setdefault(run.fault, one_line(run.example, 120))
        return bool(run.fault)

    def keep(
        self,
        task: str,
        calls: tuple[ReferenceCall, ...],
        answer: tuple[str, ...],
        *,
        difficulty: int,
        source: Literal["schemas", "llm"],
        recipe: str,
    ) -> bool:
        """Add a scenario whose calls ran twice. Returns False, and counts it as dropped, if the task is too long or known."""
        if not is_short(task):
            self.dropped["the task was too long"] += 1
            return False
        if not self._first_time(json.dumps(normalised(task)), "the same task as another"):
            return False
        self.valid.append(
            McpScenario(
                id=f"s{len(self.valid) + 1:04}",
                task=task,
                difficulty=difficulty,
                tools=tuple(dict.fromkeys(call.tool for call in calls)),
                check=CheckKind.ANSWER if answer else CheckKind.CALLS,
                calls=calls,
                answer=answer,
                source=source,
                recipe=recipe,
                server=self.pool.fingerprint,
            )
        )
        return True

    def report_progress(self) -> None:
        """Report the progress."""
        self.progress(
            f"{counted(len(self.valid), 'valid scenario')}, {counted(sum(self.dropped.values()), 'candidate')} dropped"
        )

    def result(self, held_out: float) -> ScenarioSet:
        """Split the valid scenarios, select `count` of them, and number them."""
        split = split_scenarios(self.valid, held_out=held_out, seed=self.seed)
        evaluation = [scenario for scenario in split if scenario.split == "eval"]
        chosen = select(evaluation, number_held_out(self.count, held_out), self.rng)
        chosen += select([s for s in split if s.split == "train"], self.count - len(chosen), self.rng)
        self.rng.shuffle(chosen)
        if both := len(self.valid) - len(split):
            self.dropped["its calls belong to both parts, training and held out"] += both
        if spare := len(split) - len(chosen):
            self.dropped["more than were asked for"] += spare
        numbered = tuple(scenario.model_copy(update={"id": f"s{n:04}"}) for n, scenario in enumerate(chosen, 1))
        return ScenarioSet(numbered, self.pool.fingerprint, dict(self.dropped), self.examples)

    def _first_time(self, key: str, otherwise: str) -> bool:
        if key in self._known:
            self.dropped[otherwise] += 1
            return False
        self._known.add(key)
        return True
