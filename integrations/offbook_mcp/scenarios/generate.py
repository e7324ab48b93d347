"""`generate_scenarios`: draws scenarios from the tools' schemas and the server's results, or lets an LLM write them; runs them
twice, selects and splits them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook.llms.llm import Llm
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target, TargetLike
from offbook_mcp.tools.tool import ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .execution import SERVER_FAILED, Answered, Progress, ReferenceRun, ScenarioGeneration, with_results
from .explore import explore, withheld_lines
from .from_llm import from_llm
from .harvest import Leaf, comma_list, is_dated, strings_of
from .sampler import DraftCall, Plan, ValueLink
from .scenario import HELD_OUT, ScenarioSet
from .wording import phrases_of, task_of, tells_its_calls


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | Llm | None = None,
    max_difficulty: int = 5,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Generate up to `count` scenarios, every one run twice on the server. Up to a quarter of them is for evaluation.

    llm: the model that writes them ("openai/gpt-4.1", or an `Llm`); None: drawn from the schemas and the server's results.
    max_difficulty: 1 (one value) to 5 (three calls).
    progress: called with a line of text per event.
    Raises ConfigError for an invalid option, if there are far fewer scenarios than wanted or none can be held out, McpServerError, LlmError, BudgetExceeded.
    """
    if count < 1 or not 1 <= max_difficulty <= 5:
        raise ConfigError(
            f"scenarios: count >= 1, 1 <= max_difficulty <= 5 are needed, got {count} and {max_difficulty}"
        )
    async with _opened(pool_or_target) as pool:
        for line in withheld_lines(pool.toolset.left_out):
            progress(line)
        work = ScenarioGeneration(pool, await explore(pool, seed=seed), count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    scenarios = work.result()
    check_enough(work, scenarios)
    for line in without_scenarios(work, scenarios):
        progress(line)
    return scenarios


@asynccontextmanager
async def _opened(pool_or_target: ServerPool | TargetLike) -> AsyncGenerator[ServerPool]:
    if isinstance(pool_or_target, ServerPool):
        yield pool_or_target
        return
    async with ServerPool(Target.parse(pool_or_target), ahead=1) as pool:
        yield pool


_ERRORS_SHOWN = 3
_FEW_HELD_OUT = 8
"""Held-out scenarios below which their success says little."""
_MIN_SHARE = 0.25
"""Share of the wanted scenarios below which a generation has failed: a run on them would measure nothing."""


def without_scenarios(work: ScenarioGeneration, scenarios: ScenarioSet) -> Iterator[str]:
    """A line for each tool that was used and has no scenario, with the reason."""
    taken = {name for scenario in scenarios.scenarios for name in scenario.tools}
    exploration = work.exploration
    for tool in work.pool.toolset.tools:
        name = tool.name
        if name in taken:
            continue
        if (reason := exploration.left_out.get(name)) is None:
            error = exploration.first_error(name)
            worked = any(observation.worked for observation in exploration.of(name))
            reason = (
                "its calls work, but no task on them was kept"
                if worked
                else f"no call of it worked: {error or 'all were empty'}"
            )
        yield f"no scenario: {one_line(name, 64)}: {one_line(reason, 300)}"


def few_held_out(scenarios: ScenarioSet, wanted: int, file: object) -> str | None:
    """What to do if so few of the scenarios are held out that success on them says little."""
    held_out = len(scenarios.eval)
    if held_out >= min(_FEW_HELD_OUT, round(HELD_OUT * wanted)):
        return None
    return f'{held_out} held out say little about success: write more with "split": "eval" in {file}'


def check_enough(work: ScenarioGeneration, scenarios: ScenarioSet) -> None:
    """Raise ConfigError, with reasons and remedies, for far fewer scenarios than wanted, or if none could be held out."""
    made, wanted = len(scenarios.scenarios), work.count
    unmeasured = bool(made) and HELD_OUT * wanted >= 1 and not scenarios.eval
    if made >= _MIN_SHARE * wanted and made and not unmeasured:
        return
    found = f"only {made} of {wanted}" if made else "none"
    if unmeasured:
        found += ", of which none can be held out to measure success,"
    raise ConfigError(
        f"scenarios: {found} could be made for {work.pool.target.shown()}: {_reasons(work)}{_advice(work, 0 if unmeasured else made)}"
    )


def _reasons(work: ScenarioGeneration) -> str:
    """Why there are so few, on one line."""
    reasons = [
        f"{number} {reason}" + (f" ({example})" if (example := work.examples.get(reason)) else "")
        for reason, number in work.dropped.most_common()
    ]
    reasons += withheld_lines(work.exploration.left_out)
    return one_line("; ".join(reasons), 600) or "no call gave anything new to ask for"


def _advice(work: ScenarioGeneration, enough: int) -> str:
    """An error of each tool for which no call worked, and what to do. `enough`: a count that would do; 0: none."""
    exploration = work.exploration
    tried = {observation.tool for observation in exploration.observations}
    worked = {observation.tool for observation in exploration.observations if observation.worked}
    errors = [(tool, error) for tool in sorted(tried - worked) if (error := exploration.first_error(tool))]
    shown = "".join(f"\nno call of {one_line(tool, 64)} worked: {error}" for tool, error in errors[:_ERRORS_SHOWN])
    fewer = f"; or ask for fewer: --count {enough}" if enough else ""
    return (
        f"{shown}\nAllow the tools that are left out; list valid arguments in the tool's schema (`enum` or `examples`), or offer a "
        f"tool that lists them; use --llm; or write the scenarios yourself (docs/mcp_scenarios.md){fewer}"
    )


_MAX_LISTED = 5
_LONGEST_LINE = 48
_NUMBER = re.compile(r"(?<![\w.,:/-])-?\d+(?:\.\d+)?(?![\w.]*\w|[,:/-]\w)")
"""A number that stands alone: no part of a date, a time, a version or an id."""


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
    again = {(leaf.place, leaf.value) for leaf in second.leaves}
    leaves = [leaf for leaf in first.leaves if (leaf.place, leaf.value) in again and not isinstance(leaf.value, bool)]
    if first.text == second.text and "\n" not in first.text.strip() and (line := _line(first)) is not None:
        return line
    if named := _named(leaves, first):
        leaf = rng.choice(named)
        return Expected((_shown(leaf),), _name_in_result(leaf))
    listed = _listed(leaves)
    if first.text == second.text and listed:
        return Expected(tuple(_shown(leaf) for leaf in listed))
    return None


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
    if not text or text.endswith(":") or not answered.plain:
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


_TRIES = 6
_WAVES = 12
_WAVES_FOR_THE_REST = 3
_WAVE_PLANS = 60
_WAVE_WRITES = 12
_SPARE = 1.3
"""Factor of valid scenarios to draw, so that the selection can be balanced and something held out."""
_SAME_ANSWER = 3
"""The most single-call scenarios of a tool with the same result text."""


async def from_schemas(work: ScenarioGeneration) -> None:
    """Draw and run plans in waves until there are enough valid scenarios. Tools with few scenarios come first.

    Up to _WAVES_FOR_THE_REST waves more are of the tools that worked and have no scenario yet.
    """
    drawing = _Drawing(work)
    fruitless = 0
    for _ in range(_WAVES if drawing.tools else 0):
        missing = round(work.count * _SPARE) - len(work.valid)
        if missing <= 0 or fruitless > 2:
            break
        before = len(work.valid)
        await drawing.wave(drawing.tools, missing)
        fruitless = fruitless + 1 if len(work.valid) == before else 0
        work.report_progress()
    for _ in range(_WAVES_FOR_THE_REST):
        if rest := drawing.without_scenario():
            await drawing.wave(rest, len(rest))
            work.report_progress()


@dataclass
class _Drawing:
    work: ScenarioGeneration
    answers: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        offered = self.work.pool.toolset.tools
        self.phrases = phrases_of(offered)
        self.tools = [tool for tool in offered if tool.name not in self.work.exploration.left_out]
        self.readers = [tool for tool in self.tools if tool.tool.kind is ToolKind.READ]

    def without_scenario(self) -> list[ModelTool]:
        """The tools of which a call worked, and which no valid scenario uses."""
        taken = {tool for scenario in self.work.valid for tool in scenario.tools}
        worked = {observation.tool for observation in self.work.exploration.observations if observation.worked}
        return [tool for tool in self.tools if tool.name in worked - taken]

    async def wave(self, tools: Sequence[ModelTool], missing: int) -> None:
        """Draw plans for these tools, run them twice, and keep the valid ones."""
        plans = self._plans(tools, min(_WAVE_PLANS, max(10, round(1.6 * missing))))
        for plan, run, again in await self.work.run_twice(plans, self._drop):
            self._keep(plan, run, again)

    def _plans(self, tools: Sequence[ModelTool], wanted: int) -> list[Plan]:
        """Draw new plans for the tools in turn, beginning with those that have few scenarios."""
        counts = Counter(tool for scenario in self.work.valid for tool in scenario.tools)
        tools = sorted(tools, key=lambda tool: counts[tool.name])
        plans: list[Plan] = []
        writes = 0
        for number in range(3 * wanted):
            plan = self.plan(tools[number % len(tools)], self.work.max_difficulty)
            if plan is None or (plan.writes and writes >= _WAVE_WRITES) or not self.work.is_new(plan.calls):
                continue
            writes += plan.writes
            plans.append(plan)
            if len(plans) >= wanted:
                break
        return plans

    def _drop(self, plan: Plan, run: ReferenceRun) -> bool:
        """Whether the plan makes no scenario. A single call also tells which values its tool accepts."""
        single = len(plan.drafts) == 1
        if single and run.fault != SERVER_FAILED:
            self.work.exploration.sampler.learn(plan.drafts[0], not run.fault)
        fault = run.fault
        if not fault and plan.link is not None and str(plan.link.pick.value) not in run.answers[0].text:
            fault = "the value for the next call was not in the answer"
        if not fault and single and not plan.writes:
            key = f"{plan.drafts[0].tool.name}\n{run.answers[0].text}"
            self.answers[key] += 1
            fault = "the same answer as others" if self.answers[key] > 2 * _SAME_ANSWER else ""  # every plan runs twice
        return self.work.drop(replace(run, fault=fault))

    def _keep(self, plan: Plan, first: ReferenceRun, second: ReferenceRun) -> None:
        answers = {} if self.work.executor.writes(plan.calls[-1:]) else self._expected(plan, first, second)
        asks = {number: answer.ask for number, answer in answers.items()}
        task = task_of(plan, asks, self.work.rng, self.phrases)
        if not tells_its_calls(task, plan):
            self.work.dropped["the task did not tell its calls"] += 1
            return
        values = tuple(
            dict.fromkeys(value for answer in answers.values() for value in answer.values if value not in task)
        )
        calls = with_results(plan.calls, first, second)
        self.work.keep(task, calls, values, difficulty=plan.difficulty, source="schemas", recipe=plan.recipe)

    def _expected(self, plan: Plan, first: ReferenceRun, second: ReferenceRun) -> dict[int, Expected]:
        """By the number of a call, the values that the final answer must contain: of independent calls, else of the last.

        If some values have a name to ask for, values without one are left out.
        """
        pairs = list(enumerate(zip(first.answers, second.answers, strict=True)))
        open_world = {tool.name for tool in self.work.pool.toolset.tools if tool.tool.open_world}
        task_texts = " ".join(strings_of([dict(call.arguments) for call in plan.calls]))
        answers = {
            number: value
            for number, (one, other) in (pairs if plan.link is None else pairs[-1:])
            if one.tool not in open_world and (value := expected(one, other, self.work.rng)) is not None
        }
        news = {n: answer for n, answer in answers.items() if any(value not in task_texts for value in answer.values)}
        return {n: answer for n, answer in news.items() if answer.ask} or news

    def plan(self, tool: ModelTool, most_difficult: int) -> Plan | None:
        """Draw a plan that uses this tool; None if the drawn plan is too difficult."""
        kinds = [self._single, partial(self._sequence, 2), partial(self._sequence, 3), self._flow]
        weights = [11, 3 * (most_difficult > 2), most_difficult > 4, 5 * (most_difficult > 3)]
        plan = self.work.rng.choices(kinds, [float(weight) for weight in weights])[0](tool)
        plan = plan or self._single(tool)
        return plan if plan is not None and plan.difficulty <= most_difficult else None

    def _single(self, tool: ModelTool) -> Plan | None:
        draft = self.work.exploration.sampler.draw(tool)
        return None if draft is None else Plan((draft,))

    def _sequence(self, length: int, tool: ModelTool) -> Plan | None:
        """Distinct calls with arguments, of this tool and other reading tools; None if the draw has none."""
        if tool.tool.kind is not ToolKind.READ:
            return None
        tools = [tool, *(self.work.rng.choice(self.readers) for _ in range(length - 1))]
        self.work.rng.shuffle(tools)
        drafts = [
            draft for drawn_tool in tools if (draft := self.work.exploration.sampler.draw(drawn_tool)) is not None
        ]
        distinct = {repr((draft.tool.name, draft.arguments)) for draft in drafts}
        if len(distinct) < length or sum(not draft.arguments for draft in drafts) > 0:
            return None
        return Plan(tuple(drafts))

    def _flow(self, tool: ModelTool) -> Plan | None:
        """A call with an argument from another tool's result, after the call that returns this result."""
        for _ in range(_TRIES):
            draft = self.work.exploration.sampler.draw(tool)
            if draft is None:
                return None
            for pick in draft.picks:
                leaf = pick.leaf
                if leaf is None or not self.work.exploration.sampler.worked(pick.slot, pick.source):
                    continue
                if sum(other.slot.argument == pick.slot.argument for other in draft.picks) > 1:
                    continue
                first = self._first_call(leaf, draft)
                if first is not None:
                    observation, is_first = first
                    reader = next(other for other in self.readers if other.name == observation.tool)
                    link = ValueLink(pick, leaf.words, is_first)
                    return Plan((DraftCall(reader, observation.arguments, ()), draft), link)
        return None

    def _first_call(self, leaf: Leaf, draft: DraftCall) -> tuple[Answered, bool] | None:
        """An observed call whose result has this value first in its place, and whether the place has further values."""
        tool = leaf.place.split(":")[0]
        if (
            tool == draft.tool.name
            or tool not in {reader.name for reader in self.readers}
            or leaf.place.endswith(": lines")
        ):
            return None
        choices: list[tuple[Answered, bool]] = []
        for observation in self.work.exploration.of(tool):
            values = [other.value for other in observation.leaves if other.place == leaf.place]
            if observation.worked and values and values[0] == leaf.value:
                choices.append((observation, len(set(values)) > 1))
        return self.work.rng.choice(choices) if choices else None
