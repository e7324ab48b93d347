"""Scenarios written by an LLM from the exploration. Every scenario is run before it is kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from offbook.base.errors import ConfigError, LlmError
from offbook.llms.llm import Llm

from ..tools.toolset import ModelTool
from .dates import is_dated
from .execution import ReferenceRun, with_results
from .expected_answers import Answered
from .generation import ScenarioGeneration
from .harvest import usable_value
from .scenario import ReferenceCall
from .wording import is_short
from .writer_prompt import (
    MOST_CALLS,
    WrittenAnswers,
    WrittenCall,
    WrittenScenario,
    WrittenScenarios,
    answers_question,
    question,
)

PURPOSE = "generator"
_PER_QUESTION = 12
_MOST_FRUITLESS = 3
"""Stop after this many questions in a row without a new scenario."""


def questions_for(count: int) -> int:
    """The number of LLM questions for `count` scenarios if all that it writes is valid."""
    return 2 * -(-count // _PER_QUESTION)


@dataclass(frozen=True)
class _Written:
    """A scenario that the LLM wrote, whose calls have passed the checks."""

    task: str
    difficulty: int
    calls: tuple[ReferenceCall, ...]


async def from_llm(work: ScenarioGeneration, llm: Llm) -> None:
    """Ask the LLM for scenarios until there are enough. Raises LlmError if none could be had, BudgetExceeded, ConfigError."""
    writing = _Writing(work, llm)
    fruitless = 0
    while len(work.valid) < work.count and fruitless < _MOST_FRUITLESS:
        before = len(work.valid)
        await writing.batch(min(_PER_QUESTION, work.count - len(work.valid)))
        fruitless = 0 if len(work.valid) > before else fruitless + 1
        work.tell()
    if not work.valid and writing.failure is not None:
        raise writing.failure


class _Writing:
    """Asks one question after the other. Every question tells the LLM what was wrong with its last scenarios."""

    def __init__(self, work: ScenarioGeneration, llm: Llm) -> None:
        self.work = work
        self.failure: LlmError | None = None
        self._llm = llm
        self._questions = 0
        self._complaints: Counter[str] = Counter()
        usable = [tool for tool in work.pool.toolset.tools if tool.name not in work.exploration.left_out]
        if not usable:
            raise ConfigError(f"scenarios: no tool of {work.pool.target.shown()} may be used; --allow-writes uses all")
        self._tools = {tool.name: tool for tool in usable}

    async def batch(self, wanted: int) -> None:
        """Ask for `wanted` scenarios, run the well-formed ones twice, and keep those that work."""
        before = self.work.dropped.copy()
        written = [item for item in map(self._checked, await self._ask(wanted)) if item is not None]
        first = await self.work.executor.run(written)
        good = [(item, run) for item, run in zip(written, first, strict=True) if not self.work.drop(run)]
        second = await self.work.executor.again([item for item, _ in good])
        pairs = [
            (item, run, again) for (item, run), again in zip(good, second, strict=True) if not self.work.drop(again)
        ]
        answers = await self._answers(pairs)
        for number, (item, run, again) in enumerate(pairs):
            self.work.keep(
                item.task,
                with_results(item.calls, run, again),
                answers.get(number, ()),
                difficulty=item.difficulty,
                source="llm",
                recipe=self._llm.options.model,
            )
        self._complaints = self.work.dropped - before

    async def _ask(self, wanted: int) -> list[WrittenScenario]:
        """Ask one question. Returns no scenarios if the LLM gave no usable answer."""
        work = self.work
        messages = question(
            list(self._tools.values()),
            work.exploration,
            wanted,
            work.max_difficulty,
            work.rng,
            self._complaints,
            [scenario.task for scenario in work.valid],
        )
        self._questions += 1
        try:
            answer = await self._llm.ask(messages, WrittenScenarios, PURPOSE, sample=self._questions)
        except LlmError as error:
            if error.lasting:
                raise
            self.failure = error
            work.dropped[f"a question without a usable answer ({error.kind})"] += 1
            work.progress(f"the writer gave no usable answer: {error}")
            return []
        scenarios = answer.value.scenarios
        if len(scenarios) > wanted:
            work.dropped["more than were asked for"] += len(scenarios) - wanted
        return scenarios[:wanted]

    def _checked(self, written: WrittenScenario) -> _Written | None:
        """Validate a written scenario; an invalid one is counted as dropped and returns None."""
        calls: list[ReferenceCall] = []
        for written_call in written.calls:
            call = self._call(written_call)
            if isinstance(call, str):
                self._dropped(call)
                return None
            calls.append(call)
        task = " ".join(written.task.split())
        wrong = "no calls" if not calls else f"more than {MOST_CALLS} calls" if len(calls) > MOST_CALLS else ""
        if wrong or not task:
            self._dropped(wrong or "no task")
            return None
        if not task.isprintable():
            self._dropped("a task with characters that are not shown")
            return None
        if not is_short(task):
            self._dropped("the task was too long")
            return None
        difficulty = min(max(written.difficulty, 1), 5)
        if difficulty > self.work.max_difficulty:
            self._dropped("too difficult")
            return None
        return _Written(task, difficulty, tuple(calls)) if self.work.is_new(calls) else None

    def _call(self, written: WrittenCall) -> ReferenceCall | str:
        """The call, or a text that says what is wrong with it."""
        tool = self._tools.get(written.tool)
        if tool is None:
            return "a tool that does not exist or may not be used"
        try:
            arguments = cast(object, json.loads(written.arguments or "{}"))
        except ValueError:
            return "arguments that are no JSON"
        if not isinstance(arguments, dict):
            return "arguments that are no JSON object"
        named = cast(dict[str, object], arguments)
        if wrong := _wrong_names(tool, named):
            return wrong
        return ReferenceCall(tool=tool.name, arguments=named)

    def _dropped(self, fault: str) -> bool:
        if fault:
            self.work.dropped[fault] += 1
        return bool(fault)

    async def _answers(
        self, pairs: Sequence[tuple[_Written, ReferenceRun, ReferenceRun]]
    ) -> dict[int, tuple[str, ...]]:
        """Ask the LLM what the final answers must contain, for scenarios whose tool results were the same twice.

        A value is kept if it occurs in the results and not in the task.
        """
        open_world = {tool.name for tool in self._tools.values() if tool.tool.open_world}
        stable = [
            number
            for number, (item, first, second) in enumerate(pairs)
            if [one.text for one in first.answers] == [one.text for one in second.answers]
            and not any(is_dated(one.text) for one in first.answers)
            and not open_world & {call.tool for call in item.calls}
            and not self.work.executor.writes(item.calls[-1:])
        ]
        if not stable:
            return {}
        tasks = [(pairs[number][0].task, pairs[number][1].answers) for number in stable]
        try:
            answer = await self._llm.ask(answers_question(tasks), WrittenAnswers, PURPOSE)
        except LlmError as error:
            if error.lasting:
                raise
            self.work.progress(f"these are checked by their calls only, the writer gave no usable answer: {error}")
            return {}
        return {
            stable[item.number - 1]: values
            for item in answer.value.answers
            if 0 < item.number <= len(stable) and (values := _settled(item.values, *tasks[item.number - 1]))
        }


def _settled(values: Sequence[str], task: str, answers: Sequence[Answered]) -> tuple[str, ...]:
    """The values that occur in a tool result and not in the task."""
    texts = [tool_answer.text for tool_answer in answers]
    usable = [value.strip() for value in values[:3] if usable_value(value) is not None]
    return tuple(dict.fromkeys(value for value in usable if value not in task and any(value in text for text in texts)))


def _wrong_names(tool: ModelTool, arguments: Mapping[str, object]) -> str:
    """What is wrong with the argument names; "" if nothing. Servers silently ignore unknown arguments."""
    properties = cast(dict[str, object], tool.parameters.get("properties") or {})
    required = cast(list[str], tool.parameters.get("required") or [])
    if set(arguments) - set(properties) and tool.parameters.get("additionalProperties") in (None, False):
        return "an argument that the tool does not have"
    return "a required argument is missing" if set(required) - set(arguments) else ""
