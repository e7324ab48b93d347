"""Scenarios for a target: drawn or written, run twice, chosen, split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from understudy.integration import ConfigError

from ..pool import ServerPool
from ..target import Target, TargetLike
from .answers import Expected, expected
from .execution import Executor, Run
from .explore import Exploration, explore
from .files import ScenarioSet
from .plans import Plan, PlanKind, Planner
from .scenario import CheckKind, McpScenario
from .selection import select
from .split import combination, split_scenarios
from .wording import is_short, task_of, tells_its_calls

_WAVES = 10
_SPARE = 1.25
"""Of valid scenarios, so that the choice can be balanced."""

Progress = Callable[[str], None]


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | None = None,
    allow_writes: bool = False,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    exploration: Exploration | None = None,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Up to `count` scenarios that were run twice on the server, a share `held_out` of them for evaluation.

    llm: another model writes them ("openai/gpt-4.1"); None: from the schemas and the server's own answers. allow_writes: use
    tools that write or delete, each time in a rollout of its own. exploration: what `explore` found before. progress: told
    what happens, a line at a time. Raises ConfigError for wrong options or where no scenario could be made, McpServerError.
    """
    if count < 1 or not 1 <= max_difficulty <= 5 or not 0 <= held_out < 1:
        raise ConfigError(
            "scenarios: count >= 1, 1 <= max_difficulty <= 5 and 0 <= held_out < 1 are needed, got "
            f"{count}, {max_difficulty} and {held_out}"
        )
    if not isinstance(pool_or_target, ServerPool):
        async with ServerPool(Target.parse(pool_or_target), ahead=1) as pool:
            return await generate_scenarios(
                pool,
                count=count,
                seed=seed,
                llm=llm,
                allow_writes=allow_writes,
                max_difficulty=max_difficulty,
                held_out=held_out,
                exploration=exploration,
                progress=progress,
            )
    pool = pool_or_target
    found = exploration or await explore(pool, seed=seed, allow_writes=allow_writes)
    work = _Generation(pool, found, count, seed, max_difficulty, progress)
    await work.from_schemas()
    if not work.valid:
        reasons = (
            "; ".join(f"{number} {reason}" for reason, number in work.dropped.most_common()) or "nothing was tried"
        )
        raise ConfigError(f"scenarios: none could be made for {pool.target.shown()}: {reasons}")
    return work.result(held_out)


@dataclass
class _Generation:
    """The scenarios of one call, while they are made."""

    pool: ServerPool
    found: Exploration
    count: int
    seed: int
    max_difficulty: int
    progress: Progress
    valid: list[McpScenario] = field(default_factory=list[McpScenario])
    dropped: Counter[str] = field(default_factory=Counter[str])
    _known: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.executor = Executor(self.pool, self.found)

    async def from_schemas(self) -> None:
        """Waves of plans, those tools first that have few valid scenarios yet."""
        planner = Planner(self.found, self.pool.toolset.tools, self.rng)
        if not planner.tools:
            return
        fruitless = 0
        for _ in range(_WAVES):
            missing = round(self.count * _SPARE) - len(self.valid)
            if missing <= 0 or fruitless > 2:
                return
            before = len(self.valid)
            await self._wave(planner, missing)
            fruitless = fruitless + 1 if len(self.valid) == before else 0
            self.progress(f"{len(self.valid)} valid scenarios, {sum(self.dropped.values())} dropped")

    async def _wave(self, planner: Planner, missing: int) -> None:
        made = Counter(tool for scenario in self.valid for tool in scenario.tools)
        plans: list[Plan] = []
        for tool in sorted(planner.tools, key=lambda each: made[each.name]):
            for _ in range(max(2, round(1.5 * missing / len(planner.tools)))):
                plan = planner.plan(tool, self.max_difficulty)
                if plan is not None and self._is_new(plan):
                    plans.append(plan)
        first = await self.executor.run(plans)
        for plan, run in zip(plans, first, strict=True):
            self._learn(plan, run)
        good = [(plan, run) for plan, run in zip(plans, first, strict=True) if not self._fault(plan, run)]
        second = await self.executor.again([plan for plan, _ in good])
        for (plan, run), again in zip(good, second, strict=True):
            fault = again.fault or self._link_fault(plan, again)
            if fault:
                self.dropped[fault] += 1
            else:
                self._add(plan, run, again)

    def _is_new(self, plan: Plan) -> bool:
        key = "\n".join(sorted(combination(call) for call in plan.calls))
        if key in self._known:
            self.dropped["the same calls as another"] += 1
            return False
        self._known.add(key)
        return True

    def _learn(self, plan: Plan, run: Run) -> None:
        """A single call teaches which values its tool takes."""
        if plan.kind is PlanKind.SINGLE and run.fault != "the server failed":
            self.found.sampler.learn(plan.drafts[0], not run.fault and run.effect is not False)

    def _fault(self, plan: Plan, run: Run) -> str:
        fault = run.fault or self._link_fault(plan, run)
        if fault:
            self.dropped[fault] += 1
        return fault

    def _link_fault(self, plan: Plan, run: Run) -> str:
        if plan.link is None or str(plan.link.pick.value) in run.answers[0].text:
            return ""
        return "the value for the next call was not in the answer"

    def _add(self, plan: Plan, first: Run, second: Run) -> None:
        answers = [] if plan.writes and plan.kind is PlanKind.SINGLE else self._expected(plan, first, second)
        task = task_of(plan, [each.ask for each in answers if each.ask], self.rng)
        values = tuple(dict.fromkeys(value for each in answers for value in each.values if value not in task))
        if not is_short(task):
            self.dropped["the task was too long"] += 1
        elif not tells_its_calls(task, plan):
            self.dropped["the task did not tell its calls"] += 1
        else:
            self._keep(plan, task, values)

    def _keep(self, plan: Plan, task: str, values: tuple[str, ...]) -> None:
        self.valid.append(
            McpScenario(
                id=f"s{len(self.valid) + 1:04}",
                task=task,
                difficulty=plan.difficulty,
                tools=tuple(dict.fromkeys(call.tool for call in plan.calls)),
                check=CheckKind.ANSWER if values else CheckKind.CALLS,
                calls=plan.calls,
                answer=values,
                source="schemas",
                recipe=plan.kind.value,
                server=self.pool.fingerprint,
            )
        )

    def _expected(self, plan: Plan, first: Run, second: Run) -> list[Expected]:
        """What the answers of the calls are asked for: of all that are independent, else of the last."""
        pairs = list(zip(first.answers, second.answers, strict=True))
        open_world = {tool.name for tool in self.pool.toolset.tools if tool.tool.open_world}
        asked = pairs if plan.kind is PlanKind.SEVERAL else pairs[-1:]
        return [
            value
            for one, other in asked
            if one.tool not in open_world and (value := expected(one, other, self.rng)) is not None
        ]

    def result(self, held_out: float) -> ScenarioSet:
        """The choice, numbered and split."""
        chosen = select(self.valid, self.count, self.rng)
        if spare := len(self.valid) - len(chosen):
            self.dropped["more than were asked for"] += spare
        split = split_scenarios(chosen, held_out=held_out, seed=self.seed)
        numbered = tuple(each.model_copy(update={"id": f"s{n:04}"}) for n, each in enumerate(split, 1))
        return ScenarioSet(numbered, self.pool.fingerprint, dict(self.dropped))
