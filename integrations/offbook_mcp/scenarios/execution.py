"""Calls on a server: runs them in new rollouts and judges their results, also errors that a server returns as ordinary text,
such as `Parser Error: ...` without the error flag; and the scenarios that come out of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, cast

from offbook.base.text import counted, one_line, word_list
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.errors import McpServerError, McpStartError, McpToolsChangedError
from offbook_mcp.tools.result_values import scalars_of
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult
from offbook_mcp.tools.tool import ToolKind
from offbook_mcp.training.rewards import result_digest

from .harvest import Leaf, is_dated, is_empty, leaves_of, words_of
from .sampler import ArgumentSampler
from .scenario import (
    HELD_OUT,
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

APART_SECONDS = 1.2
"""Pause between the two runs: a tool that returns the time in whole seconds must give different results."""
REFUSED = "a tool reported an error"
REFUSED_AS_TEXT = "a tool answered with an error as ordinary text"
EMPTY = "an answer was empty"
SERVER_FAILED = "the server failed"
_AT_ONCE = 2
_NONE = re.compile(r"(there (are|is) )?(no|none|nothing)\b.{0,80}", re.IGNORECASE)


@dataclass(frozen=True)
class Answered:
    """A call with its result, in which the rollout's folder is replaced by its placeholder.

    `leaves` are the result's values; `plain` means that its text has none of the known notations. `fault` is why it is of no
    use: REFUSED, REFUSED_AS_TEXT or EMPTY; "" if it is of use. `digest` is a hash of the whole result if the call has arguments
    in a language, such as SQL; else "".
    """

    tool: str
    arguments: Mapping[str, object] = field(hash=False)
    text: str
    leaves: tuple[Leaf, ...] = field(default=(), hash=False)
    plain: bool = True
    fault: str = ""
    digest: str = ""

    @classmethod
    def of(cls, call: ReferenceCall, result: ToolResult, fault: str = "", digest: str = "") -> Answered:
        """Read the values of a result, unless it is of no use."""
        leaves = () if fault else leaves_of(call.tool, call.arguments, result)
        return cls(call.tool, call.arguments, result.text, leaves, result.values is None, fault, digest)

    @property
    def empty(self) -> bool:
        return self.fault == EMPTY

    @property
    def worked(self) -> bool:
        """Whether the result is neither an error nor empty."""
        return not self.fault


NONSENSE = "zq-nothing-has-this-name"
"""A text that matches nothing: what a tool returns for it shows how the tool refuses."""
NO_ID = 987_654_321
_LONGEST = 1_000
"""Texts with more characters are content, whatever words they have."""
_STARTS = re.compile(
    r"\W*(?:[\w.]+ ){0,3}?(?:[\w.]*(?-i:Error|Exception|Failure)|error|exception|failure|fehler|erreur|ошибка)\b"
    r"(?: \[?\w+\]?){0,3}? ?(?:[:(-]|$)|\W*traceback \(most recent call last\)|\W*(?:错误|失败|エラー)",
    re.IGNORECASE,
)
_ERRNO = re.compile(r"\bE(NOENT|ISDIR|NOTDIR|ACCES|PERM|EXIST|INVAL)\b")
"""A file system error of Node."""
_SAYS = re.compile(
    r"\bnot (?:yet )?(?:authenticated|authori[sz]ed|logged in|configured|permitted|implemented)\b|\bunauthori[sz]ed\b"
    r"|\bauthentication (?:is )?(?:required|failed)\b|\b(?:please|must|need to) (?:log|sign) in\b"
    r"|\b(?:access|permission) (?:is )?denied\b|\bforbidden\b|\b(?:rate limit|quota) (?:was |is )?exceeded\b"
    r"|\btoo many requests\b|\binternal server error\b|\bconnection (?:refused|reset|failed)\b|\btimed out\b"
    r"|\b(?:an )?(?:error|exception) (?:has )?occurred\b|\bsyntax error\b|\bHTTP(?: status)?(?: code)?[: ]+[45]\d\d\b"
    r"|\bfailed to (?:connect|execute|fetch|find|get|load|open|parse|read|resolve|run|retrieve|process)\b"
    r"|\b(?:api[ _]key|credentials|token)\b.{0,30}\b(?:missing|required|not set|invalid|expired)\b"
    r"|\b(?:missing|invalid|no) (?:\w+ )?(?:api[ _]key|credentials|token)\b",
    re.IGNORECASE,
)
_COMPLAINS = re.compile(
    r"error|not found|no such|unknown|invalid|does not exist|doesn't exist|missing|cannot|can't|could not|unable|fail"
    r"|not (?:a )?(?:valid|supported|available|recogni[sz]ed|allowed|defined)|must be",
    re.IGNORECASE,
)
_ABOUT_ERRORS = frozenset(
    word_list(
        """check debug diagnostic error exception explain failure issue lint log problem status trace validate verify warning"""
    )
)
"""Words in the names of tools whose results are about errors."""
_ERROR_KEYS = {"error", "errors", "errormessage", "exception", "traceback"}
_NO_ERROR = {"", "0", "false", "none", "null", "[]", "{}", "no"}
_FAILURES = {"failed", "failure", "fail"}
_EXPLANATIONS = {"detail", "details", "message", "reason", "error"}


@dataclass(frozen=True)
class Control:
    """A tool's result for arguments that match nothing. Other results are compared with it."""

    arguments: Mapping[str, object] = field(hash=False)
    text: str


def reads_like_error(tool: str, arguments: Mapping[str, object], result: ToolResult, control: Control | None) -> bool:
    """Whether a result without the error flag is an error.

    A line that complains is one if the control has the same line. Texts of the arguments are ignored.
    """
    text, structure = result.text, result.values
    if _ERRNO.search(text) or (structure is not None and _reports_error(structure)):
        return True
    lines = masked(text, arguments)
    controlled = masked(control.text, control.arguments) if control is not None else []
    if not {line for line in controlled if _COMPLAINS.search(line)}.isdisjoint(lines):
        return True
    first = next((line for line in lines if line.strip()), "")
    if len(text) > _LONGEST or not _ABOUT_ERRORS.isdisjoint(words_of(tool)):
        return False
    short = len(lines) < 4 or structure is not None
    return bool(_STARTS.match(first)) or (short and bool(_SAYS.search(first)))


def masked(text: str, arguments: Mapping[str, object]) -> list[str]:
    """The lines of a text, with the values of the arguments replaced by `*`."""
    texts = {str(value) for value in scalars_of(arguments) if value is not None and str(value).strip(". ")}
    for value in sorted(texts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "*", text)
    return text.splitlines()


def _reports_error(structure: object) -> bool:
    """Whether an object, or each of a list, says so: `{"error": "..."}`, `{"success": false}`, `{"status": "error"}`."""
    if isinstance(structure, Mapping):
        named = {key.casefold().replace("_", ""): value for key, value in cast(Mapping[str, object], structure).items()}
        return any(_is_failure(key, value, named) for key, value in named.items())
    items = cast(Sequence[object], structure) if isinstance(structure, list) else ()
    return bool(items) and all(isinstance(item, Mapping) and _reports_error(cast(object, item)) for item in items)


def _is_failure(key: str, value: object, named: Mapping[str, object]) -> bool:
    """Whether one field reports an error. A job's `error` or `status: "failed"` among other facts is a fact about it."""
    if key in _ERROR_KEYS:
        return len(named) < 4 and str(value).casefold() not in _NO_ERROR
    if key in ("success", "ok", "succeeded"):
        return str(value).casefold() == "false"
    if key == "iserror":
        return value is True
    if key == "status" and isinstance(value, str):
        failed = value.casefold()
        return failed == "error" or (failed in _FAILURES and not _EXPLANATIONS.isdisjoint(named))
    return key in ("statuscode", "httpstatus") and re.fullmatch(r"[45]\d\d", str(value)) is not None


class Runnable(Protocol):
    """Something with reference calls: a draft, a plan or a written scenario."""

    @property
    def calls(self) -> tuple[ReferenceCall, ...]: ...


RunnableT = TypeVar("RunnableT", bound=Runnable)


@dataclass(frozen=True)
class ReferenceRun:
    """The results of reference calls, up to the first that is of no use.

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
    """Runs reference calls. Plans that only read share a rollout; every other plan gets a new one.

    `controls` has the result of each tool for arguments that match nothing; None if the tool takes no free text.
    """

    def __init__(self, pool: ServerPool, controls: Mapping[str, Control | None]) -> None:
        self._pool = pool
        self._controls = controls
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.ended = 0.0
        self._reading = {tool.name for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ}
        seconds = pool.target.limits.explore_seconds
        self._too_slow = f"no answer within {seconds:g} s; --call-timeout waits longer"

    def writes(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether a call may change something."""
        return any(call.tool not in self._reading for call in calls)

    async def run(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan once; the results are in the order of the plans."""

        async def alone(plan: Runnable) -> list[ReferenceRun]:
            async with self._slots:
                return await self.in_order([plan])

        reading = [plan for plan in plans if not self.writes(plan.calls)]
        writing = [plan for plan in plans if self.writes(plan.calls)]
        read, *written = await asyncio.gather(self.in_order(reading), *map(alone, writing))
        self.ended = time.monotonic()
        runs = {False: iter(read), True: (run for [run] in written)}
        return [next(runs[self.writes(plan.calls)]) for plan in plans]

    async def again(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan a second time, at least APART_SECONDS after the first."""
        await asyncio.sleep(max(0.0, self.ended + APART_SECONDS - time.monotonic()))
        return await self.run(plans)

    async def in_order(
        self, plans: Iterable[RunnableT], done: Callable[[RunnableT, ReferenceRun], None] = lambda plan, run: None
    ) -> list[ReferenceRun]:
        """Run plans in one rollout; `done` is called after each, before the next is taken from `plans`.

        After a server failure, or a call without an answer, it continues in a new rollout: a server that is stuck in one call
        may answer no other.
        """
        runs: list[ReferenceRun] = []
        waiting = iter(plans)

        def following(plan: RunnableT, run: ReferenceRun) -> RunnableT | None:
            runs.append(run)
            done(plan, run)
            return next(waiting, None)

        plan = next(waiting, None)
        while plan is not None:
            try:
                async with self._pool.rollout() as tools:
                    stuck = False
                    while plan is not None and not stuck:
                        run = await self._calls(tools, plan.calls)
                        stuck = run.fault == self._too_slow
                        plan = following(plan, run)
            except (McpStartError, McpToolsChangedError):
                raise  # all later plans would fail too
            except McpServerError as error:
                assert plan is not None, "a rollout's end does not raise"
                plan = following(plan, ReferenceRun(fault=SERVER_FAILED, example=str(error)))
        return runs

    async def _calls(self, tools: RolloutTools, calls: Sequence[ReferenceCall]) -> ReferenceRun:
        answers: list[Answered] = []
        for call in calls:
            try:
                async with asyncio.timeout(tools.limits.explore_seconds):
                    result = await tools.call(call.tool, tools.with_folder(call.arguments))
            except TimeoutError:
                tools.give_up(call.tool)
                return ReferenceRun(fault=self._too_slow)
            result = tools.neutral_result(result)
            fault = self._fault(call, result)
            tool = self._pool.toolset.find(call.tool)
            digest = result_digest(tools, tool, result) if tool is not None and not tool.tool.open_world else ""
            answers.append(Answered.of(call, result, fault, digest))
            if fault:
                example = f"{call.tool}: {result.text}" if result.text.strip() else call.tool
                return ReferenceRun(tuple(answers), fault, example)
        return ReferenceRun(tuple(answers))

    def _fault(self, call: ReferenceCall, result: ToolResult) -> str:
        """Why a result is of no use; "" if it is of use.

        A reading tool's result is also empty if it says that there is nothing, or is the same as for nonsense.
        """
        if result.is_error:
            return REFUSED
        control = self._controls.get(call.tool)
        if reads_like_error(call.tool, call.arguments, result, control):
            return REFUSED_AS_TEXT
        same = control is not None and result.text == control.text
        nothing = is_empty(result) or same or _NONE.fullmatch(result.text.strip()) is not None
        return EMPTY if nothing and call.tool in self._reading else ""


@dataclass
class Exploration:
    """The result of exploring a server. `left_out` has the reason by tool that is not used; `controls`: see `Executor`."""

    sampler: ArgumentSampler
    observations: list[Answered] = field(default_factory=list[Answered])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    controls: dict[str, Control | None] = field(default_factory=dict[str, Control | None])

    def of(self, tool: str) -> list[Answered]:
        """The observations of one tool."""
        return [observation for observation in self.observations if observation.tool == tool]

    def first_error(self, tool: str) -> str | None:
        """The first call of a tool that was answered with an error, and the error, on one line; without errors, the first
        empty answer; None if every call worked."""
        failed = [observation for observation in self.of(tool) if not observation.worked]
        if not failed:
            return None
        shown = min(failed, key=lambda observation: observation.empty)
        text = one_line(shown.text, 160) or "an empty answer"
        return f"{one_line(repr(dict(shown.arguments)), 100)} -> {text}"


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
        self.executor = Executor(self.pool, self.exploration.controls)

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

    async def run_twice(
        self, plans: Sequence[RunnableT], drop: Callable[[RunnableT, ReferenceRun], bool]
    ) -> list[tuple[RunnableT, ReferenceRun, ReferenceRun]]:
        """Run every plan twice, and return those that are dropped after neither run."""
        first = zip(plans, await self.executor.run(plans), strict=True)
        good = [(plan, run) for plan, run in first if not drop(plan, run)]
        second = await self.executor.again([plan for plan, _ in good])
        return [(plan, run, again) for (plan, run), again in zip(good, second, strict=True) if not drop(plan, again)]

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

    def result(self) -> ScenarioSet:
        """Split the valid scenarios, select `count` of them, and number them."""
        split = split_scenarios(self.valid, seed=self.seed)
        evaluation = [scenario for scenario in split if scenario.split == "eval"]
        chosen = select(evaluation, number_held_out(self.count, HELD_OUT), self.rng)
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
