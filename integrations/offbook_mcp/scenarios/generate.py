"""`generate_scenarios`: draws scenarios from the tools' schemas and the server's results, or lets an LLM write them; runs them
twice, selects and splits them."""

from __future__ import annotations

import random
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

from .execution import SERVER_FAILED, Expected, Progress, ReferenceRun, ScenarioGeneration, expected, with_results
from .explore import Exploration, Observation, explore, withheld_lines
from .from_llm import from_llm
from .harvest import Leaf, strings_of
from .sampler import DraftCall, Plan, PlanKind, ValueLink
from .scenario import HELD_OUT, ScenarioSet
from .wording import phrases_of, task_of, tells_its_calls


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | Llm | None = None,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Generate up to `count` scenarios, every one run twice on the server. A share `held_out` of them is for evaluation.

    llm: the model that writes them ("openai/gpt-4.1", or an `Llm`); None: drawn from the schemas and the server's results.
    max_difficulty: 1 (one value) to 5 (three calls).
    progress: called with a line of text per event.
    Raises ConfigError for an invalid option, if there are far fewer scenarios than wanted or none can be held out, McpServerError, LlmError, BudgetExceeded.
    """
    if count < 1 or not 1 <= max_difficulty <= 5 or not 0 <= held_out < 1:
        raise ConfigError(
            "scenarios: count >= 1, 1 <= max_difficulty <= 5 and 0 <= held_out < 1 are needed, got "
            f"{count}, {max_difficulty} and {held_out}"
        )
    async with _opened(pool_or_target) as pool:
        for line in withheld_lines(pool.toolset.left_out):
            progress(line)
        work = ScenarioGeneration(pool, await explore(pool, seed=seed), count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    scenarios = work.result(held_out)
    check_enough(work, scenarios, held_out)
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


def check_enough(work: ScenarioGeneration, scenarios: ScenarioSet, held_out: float) -> None:
    """Raise ConfigError, with reasons and remedies, for far fewer scenarios than wanted, or if none could be held out."""
    made, wanted = len(scenarios.scenarios), work.count
    unmeasured = bool(made) and held_out * wanted >= 1 and not scenarios.eval
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
    ways: list[str] = []
    if exploration.left_out:
        ways.append("allow the tools that are left out")
    if errors:
        ways.append("list valid arguments in the tool's schema (`enum` or `examples`), or offer a tool that lists them")
    ways.append("use --llm, or write the scenarios yourself (docs/mcp_scenarios.md)")
    if enough:
        ways.append(f"or ask for fewer: --count {enough}")
    text = "; ".join(ways)
    return f"{shown}\n{text[0].upper()}{text[1:]}"


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
    planner = Planner(work.exploration, work.pool.toolset.tools, work.rng)
    drawing = _Drawing(work, planner)
    fruitless = 0
    for _ in range(_WAVES if planner.tools else 0):
        missing = round(work.count * _SPARE) - len(work.valid)
        if missing <= 0 or fruitless > 2:
            break
        before = len(work.valid)
        await drawing.wave(planner.tools, missing)
        fruitless = fruitless + 1 if len(work.valid) == before else 0
        work.report_progress()
    for _ in range(_WAVES_FOR_THE_REST):
        if rest := drawing.without_scenario():
            await drawing.wave(rest, len(rest))
            work.report_progress()


@dataclass
class _Drawing:
    work: ScenarioGeneration
    planner: Planner
    answers: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.phrases = phrases_of(self.work.pool.toolset.tools)

    def without_scenario(self) -> list[ModelTool]:
        """The tools of which a call worked, and which no valid scenario uses."""
        taken = {tool for scenario in self.work.valid for tool in scenario.tools}
        worked = {observation.tool for observation in self.work.exploration.observations if observation.worked}
        return [tool for tool in self.planner.tools if tool.name in worked - taken]

    async def wave(self, tools: Sequence[ModelTool], missing: int) -> None:
        """Draw plans for these tools, run them twice, and keep the valid ones."""
        plans = self._plans(tools, min(_WAVE_PLANS, max(10, round(1.6 * missing))))
        first = await self.work.executor.run(plans)
        for plan, run in zip(plans, first, strict=True):
            self._learn(plan, run)
        good = [(plan, run) for plan, run in zip(plans, first, strict=True) if self._may_stay(plan, run)]
        second = await self.work.executor.again([plan for plan, _ in good])
        for (plan, run), again in zip(good, second, strict=True):
            if self._may_stay(plan, again):
                self._keep(plan, run, again)

    def _plans(self, tools: Sequence[ModelTool], wanted: int) -> list[Plan]:
        """Draw new plans for the tools in turn, beginning with those that have few scenarios."""
        counts = Counter(tool for scenario in self.work.valid for tool in scenario.tools)
        tools = sorted(tools, key=lambda tool: counts[tool.name])
        plans: list[Plan] = []
        writes = 0
        for number in range(3 * wanted):
            plan = self.planner.plan(tools[number % len(tools)], self.work.max_difficulty)
            if plan is None or (plan.writes and writes >= _WAVE_WRITES) or not self.work.is_new(plan.calls):
                continue
            writes += plan.writes
            plans.append(plan)
            if len(plans) >= wanted:
                break
        return plans

    def _learn(self, plan: Plan, run: ReferenceRun) -> None:
        """Learn from a single call which values its tool accepts."""
        if plan.kind is PlanKind.SINGLE and run.fault != SERVER_FAILED:
            self.work.exploration.sampler.learn(plan.drafts[0], not run.fault)

    def _may_stay(self, plan: Plan, run: ReferenceRun) -> bool:
        fault = run.fault
        if not fault and plan.link is not None and str(plan.link.pick.value) not in run.answers[0].text:
            fault = "the value for the next call was not in the answer"
        if not fault and plan.kind is PlanKind.SINGLE and not plan.writes:
            key = f"{plan.drafts[0].tool.name}\n{run.answers[0].text}"
            self.answers[key] += 1
            fault = "the same answer as others" if self.answers[key] > 2 * _SAME_ANSWER else ""  # every plan runs twice
        return not self.work.drop(replace(run, fault=fault))

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
        self.work.keep(task, calls, values, difficulty=plan.difficulty, source="schemas", recipe=plan.kind.value)

    def _expected(self, plan: Plan, first: ReferenceRun, second: ReferenceRun) -> dict[int, Expected]:
        """By the number of a call, the values that the final answer must contain: of independent calls, else of the last.

        If some values have a name to ask for, values without one are left out.
        """
        pairs = list(enumerate(zip(first.answers, second.answers, strict=True)))
        open_world = {tool.name for tool in self.work.pool.toolset.tools if tool.tool.open_world}
        task_texts = " ".join(strings_of([dict(call.arguments) for call in plan.calls]))
        answers = {
            number: value
            for number, (one, other) in (pairs if plan.kind is PlanKind.SEVERAL else pairs[-1:])
            if one.tool not in open_world and (value := expected(one, other, self.work.rng)) is not None
        }
        news = {n: answer for n, answer in answers.items() if any(value not in task_texts for value in answer.values)}
        return {n: answer for n, answer in news.items() if answer.ask} or news


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
                if leaf is None or not self.exploration.sampler.worked(pick.slot, pick.source):
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
