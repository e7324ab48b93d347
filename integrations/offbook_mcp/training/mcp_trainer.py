"""`MCPTrainer`: generates scenarios for a server, trains on them, and measures success on held-out scenarios."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from offbook import TrainableModel, Trainer, TrajectoryGroup
from offbook.base.errors import ConfigError
from offbook.base.option_names import names_checked
from offbook.base.options import option, takes
from offbook.base.sync_calls import run_sync
from offbook.base.terminal import echo
from offbook.base.text import counted, one_line
from offbook.client.model import FixedStepModel
from offbook.contracts import Judge
from offbook.llms.ledger import budget
from offbook.llms.llm import Llm
from offbook.tracing.sink_registry import resolve_sinks
from offbook.trainer.evaluate import Evaluation, summarise
from offbook.trainer.options import TrainerOptions
from offbook.trainer.report import TrainReport
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target, TargetLike
from offbook_mcp.scenarios.explore import withheld_lines
from offbook_mcp.scenarios.generate import few_held_out, generate_scenarios
from offbook_mcp.scenarios.scenario import HELD_OUT, McpScenario, ScenarioSet, save_scenarios
from offbook_mcp.training.agent_loop import LoopOptions
from offbook_mcp.training.scenario_rollouts import McpRollout

from .defaults import GROUP_SIZE, default_concurrency, default_config, defaults_for
from .scenario_rollouts import (
    ScenarioJudge,
    ScenarioRollout,
    ScenariosLike,
    as_set,
    check_usable,
    scenario_file,
    unjudged,
    unused_judge,
)

SOLVED = 0.9
"""Success before training that leaves little to learn."""
_BY_TOOL = "success."


class Measured(BaseModel):
    """Means over held-out scenarios at one step: `success`, `success.TOOL`, and the parts of the reward. `scored`: number of
    scenarios with a score; None: kept by a version that did not count them."""

    model_config = ConfigDict(frozen=True)

    step: int
    rates: dict[str, float]
    scored: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Measurements before and after training. `scenarios` is the scenario file's hash, `held_out` the number measured."""

    scenarios: str
    held_out: int
    before: Measured | None = None
    after: Measured | None = None

    def lines(self) -> Iterator[str]:
        """The table as lines, or one line if nothing was measured."""
        if self.before is None or self.after is None:
            yield "success was not measured: no scenario is held out"
            return
        if "success" not in self.after.rates:
            yield "success was not measured: a judge scores the held-out scenarios. Compare steps with `offbook compare"
            yield "mcp:TARGET --with step:0 --with step:newest --judge MODEL`"
            return
        yield f"success on {self.held_out} held-out scenarios (greedy), scenarios {self.scenarios[:16]}"
        names = [name for name in self.after.rates if name.startswith(_BY_TOOL)]
        rows = [("all", "success"), *((one_line(name.removeprefix(_BY_TOOL), 64), name) for name in names)]
        width = max(len(label) for label, _ in rows)
        yield f"{'':{width}}  {f'step {self.before.step}':>9}  {f'step {self.after.step}':>9}"
        for label, name in rows:
            yield f"{label:{width}}  {_percent(self.before.rates.get(name)):>9}  {_percent(self.after.rates.get(name)):>9}"
        counts = [self.held_out if one.scored is None else one.scored for one in (self.before, self.after)]
        if min(counts) < self.held_out:
            yield (
                f"Rollouts failed, so step {self.before.step} was scored on {counts[0]} of the {self.held_out} scenarios and step "
                f"{self.after.step} on {counts[1]}: the columns do not compare the same ones."
            )
        if self.before.rates.get("success", 0.0) >= SOLVED:
            yield "The model solved most of these before training: harder ones leave more to learn (--scenarios FILE)."


def tool_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """The success per tool as lines, from the metrics of an evaluation."""
    names = sorted(name for name in metrics if name.startswith(_BY_TOOL))
    labels = [one_line(name.removeprefix(_BY_TOOL), 64) for name in names]
    width = max((len(label) for label in labels), default=0)
    for label, name in zip(labels, names, strict=True):
        yield f"  {label:{width}}  {_percent(metrics[name]):>4}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


KEY = "mcp"
"""Key in the model's state."""


class TrainingState(BaseModel):
    """The stored state. `scenarios` is the hash of the scenarios that it belongs to."""

    scenarios: str
    before: Measured | None = None
    after: Measured | None = None

    @classmethod
    async def of(cls, model: TrainableModel, scenarios: str) -> TrainingState:
        """Read the state stored with the model; a new one if there is none, or it belongs to other scenarios."""
        kept = (await model.read_state()).get(KEY)
        try:
            state = cls.model_validate(kept)
        except ValidationError:  # no state, or one of another version
            return cls(scenarios=scenarios)
        return state if state.scenarios == scenarios else cls(scenarios=scenarios)

    async def keep(self, model: TrainableModel) -> None:
        """Store this state with the model."""
        await model.merge_state({KEY: self.model_dump(mode="json")})


class ScenarioTrainer(Trainer):
    """A Trainer for MCP scenarios. `state` has what its evaluations measured."""

    def __init__(
        self,
        model: TrainableModel,
        rollout: McpRollout,
        scenarios: Sequence[McpScenario],
        state: TrainingState,
        **options: Any,
    ) -> None:
        super().__init__(model, rollout, scenarios, **options)
        self.state = state
        self._kept = state.model_copy()

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """Stores the measurement before training, so that a run that is cut off does not repeat it."""
        await self.keep_state()
        return await super().next_scenarios(scenarios, number)

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Note the measurement; the first one is also the measurement before training."""
        step = next((rollout.place.step for group in groups for rollout in group if rollout.place.step is not None), 0)
        measured = summarise(groups, {self.model.name: step}, 0.0)
        self.state.after = Measured(step=step, rates=measured.metrics, scored=measured.scored)
        if self.state.before is None:
            self.state.before = self.state.after

    async def keep_state(self) -> None:
        """Store the measurements with the model if they have changed."""
        if self.state != self._kept:
            await self.state.keep(self.model)
            self._kept = self.state.model_copy()


_NOT_MEASURED = (
    'no scenario is held out, so that success is not measured on new tasks: give some `"split": "eval"` in their file'
)


@dataclass(frozen=True, kw_only=True)
class MCPTrainerOptions(TrainerOptions):
    """The options of an MCPTrainer: those of a Trainer, except `reward` and `eval`, and its own."""

    group_size: int = option(GROUP_SIZE, "rollouts per scenario", least=2)
    scenarios_per_step: int = option(4, "scenarios per step", least=1, shown_default="4; 8 for tiny-mcp and tiny")
    concurrency: int = option(
        32, "rollouts that run at the same time", least=1, shown_default="16 if the target is a command, else 32"
    )
    seed: int = option(0, "random seed for the scenarios and their order")
    max_turns: int = option(8, "model requests per rollout", least=1)
    max_tools: int | None = option(
        None,
        "most tools shown to the model, including the expected ones",
        least=1,
        shown_default="all; 8 for tiny-mcp and tiny",
    )
    temperature: float = option(1.0, "sampling temperature of training rollouts")
    count: int = option(48, "number of scenarios to generate if there are none", least=1)
    llm: str | Llm | None = option(
        None, "LLM that writes scenarios, such as openai/gpt-4.1; None: generated from schemas and tool results"
    )
    say: Callable[[str], None] = option(echo, "called with a line of text per event")

    def check_evaluations(self) -> None:
        """Raise ConfigError for options that the scenarios decide."""
        for name in ("reward", "eval"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: an MCPTrainer takes it from the scenarios: their check, their split")


@dataclass(frozen=True)
class MCPTrainerArguments(MCPTrainerOptions):
    """Trains a model to use the tools of a target."""

    target: TargetLike
    model: TrainableModel
    scenarios: ScenariosLike = None


class MCPTrainer:
    """Trains `model` to use the tools of `target`.

    scenarios: a ScenarioSet, McpScenarios, or their file; None: the model's own file, generated at the first use. Held-out
    scenarios are evaluated before and after training; `comparison` then has both. Raises ConfigError for an invalid option.
    """

    @takes(MCPTrainerArguments, "MCPTrainer")
    def __init__(self, options: MCPTrainerArguments) -> None:
        self.target = Target.parse(options.target)
        self.model = options.model
        self.comparison: Comparison | None = None
        self.options = options
        self._training = options.passed_to(TrainerOptions)
        if options.sinks:  # an unknown name or a missing variable must fail before anything starts
            self._training["sinks"] = resolve_sinks(options.sinks)
        self._defaults = defaults_for(options.model.base_model)
        self._scenarios = options.scenarios

    @names_checked("MCPTrainer.train")
    def train(self, steps: int) -> TrainReport:
        """Sync form of `atrain`. Raises an error inside a running event loop."""
        return run_sync(self.atrain, steps)

    @names_checked("MCPTrainer.atrain")
    async def atrain(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total. A second run resumes at the newest step.

        Raises ConfigError, McpStartError, and the errors of `Trainer.atrain`.
        """
        # The Trainer opens its own budget inside this one, which also covers generating the scenarios.
        with budget(self.options.max_cost):
            async with self._prepared(steps) as (trainer, scenarios):
                return await self._trained(trainer, scenarios, steps)

    async def atrain_unmeasured(self, steps: int) -> TrainReport:
        """`atrain`, without evaluations on the held-out scenarios."""
        async with self._prepared(steps, measured=False) as (trainer, scenarios):
            return await self._trained(trainer, scenarios, steps)

    async def _trained(self, trainer: ScenarioTrainer, scenarios: ScenarioSet, steps: int) -> TrainReport:
        report = await trainer.atrain(steps)
        await trainer.keep_state()
        state = trainer.state
        self.comparison = Comparison(scenarios.digest, len(scenarios.eval), state.before, state.after)
        return report

    @names_checked("MCPTrainer.evaluate")
    def evaluate(self, *, temperature: float = 0.0, rollouts: int = 1, step: int | None = None) -> Evaluation:
        """Sync form of `aevaluate`. Raises an error inside a running event loop."""
        return run_sync(self.aevaluate, temperature=temperature, rollouts=rollouts, step=step)

    @names_checked("MCPTrainer.aevaluate")
    async def aevaluate(self, *, temperature: float = 0.0, rollouts: int = 1, step: int | None = None) -> Evaluation:
        """Score the newest step, or `step`, on the held-out scenarios; on all scenarios if none is held out."""
        with budget(self.options.max_cost):
            async with self._prepared(1, step, trained=False) as (trainer, scenarios):
                chosen = scenarios.eval or scenarios.scenarios
                return await trainer.aevaluate(chosen, temperature=temperature, rollouts=rollouts)

    @asynccontextmanager
    async def rollouts(
        self, *, judged: bool | None = None, step_tokens: int | None = None
    ) -> AsyncGenerator[tuple[ScenarioRollout, ScenarioSet]]:
        """Start the servers. Yields the rollout function, without a reward where only a judge can tell, and the scenarios.
        `judged`: whether a judge scores; None: whether the trainer has one. `step_tokens`: see `McpRollout`."""
        async with self._opened(judged, trained=False) as (pool, scenarios):
            yield unjudged(replace(self._rollout(pool), step_tokens=step_tokens)), scenarios

    async def aplan(self, steps: int) -> list[str]:
        """Describe what `atrain` would do, in lines. Starts the servers, but calls no model and writes nothing."""
        async with self._pool() as pool:
            scenarios = self.existing()
            if scenarios is not None:
                check_usable(scenarios, pool, self._max_tools, self.options.judge is not None)
            writer = self.options.llm or "the tools' schemas and what they answer"
            held_out = round(HELD_OUT * self.options.count)
            known = scenarios or (
                f"none yet: {self.options.count} are made from {writer}, about {self.options.count - held_out} to train on "
                f"and {held_out} held out, and kept in {scenario_file(self.model)}"
            )
            options = self._trainer_options(scenarios, steps)
            return plan_lines(pool, self.model, known, steps, options, self._loop(), self._max_tools)

    @property
    def _max_tools(self) -> int | None:
        return self.options.max_tools if self.options.max_tools is not None else self._defaults.max_tools

    @property
    def judge(self) -> Judge | None:
        """The judge of the options."""
        return self.options.judge

    @property
    def concurrency(self) -> int:
        """Rollouts that run at the same time."""
        return self._training.get("concurrency", default_concurrency(self.target))

    def _pool(self) -> ServerPool:
        return ServerPool(self.target, max_rollouts=self.concurrency)

    @asynccontextmanager
    async def _opened(
        self, judged: bool | None = None, *, trained: bool = True
    ) -> AsyncGenerator[tuple[ServerPool, ScenarioSet]]:
        """Start the servers, and load or generate the scenarios that can be run on them."""
        async with self._pool() as pool:
            scenarios = await self._chosen(pool)
            if changed := scenarios.server_change(pool.fingerprint):
                self.options.say(changed)
            has_judge = self.options.judge is not None if judged is None else judged
            check_usable(scenarios, pool, self._max_tools, has_judge, trained=trained)
            yield pool, scenarios

    @asynccontextmanager
    async def _prepared(
        self, steps: int, step: int | None = None, *, trained: bool = True, measured: bool = True
    ) -> AsyncGenerator[tuple[ScenarioTrainer, ScenarioSet]]:
        """Create the Trainer for the scenarios, for the newest step or for `step`."""
        async with self._opened(trained=trained) as (pool, scenarios):
            if unused := unused_judge(scenarios.scenarios, self.options.judge):
                self.options.say(f"judge: {unused}")
            model = self.model if step is None else FixedStepModel(self.model, step)
            state = await TrainingState.of(model, scenarios.digest)
            options = self._trainer_options(scenarios, steps)
            if not measured:
                options.pop("eval", None)
            chosen = scenarios.train or scenarios.eval
            yield ScenarioTrainer(model, self._rollout(pool), chosen, state, **options), scenarios

    def existing(self) -> ScenarioSet | None:
        """The scenarios if they exist; None if they have to be generated."""
        if self._scenarios is not None:
            return as_set(self._scenarios)
        file = scenario_file(self.model)
        return as_set(file) if file.exists() else None

    async def _chosen(self, pool: ServerPool) -> ScenarioSet:
        existing = self.existing()
        if existing is not None:
            for line in withheld_lines(pool.toolset.left_out):
                self.options.say(line)
            if not existing.eval:
                self.options.say(_NOT_MEASURED)
            if ignored := self._generation_options():
                where = "scenarios=" if self._scenarios is not None else str(scenario_file(self.model))
                self.options.say(
                    f"not used: {', '.join(ignored)}, since no scenarios are made; those of {where} are used"
                )
            return existing
        scenarios = await self._generated(pool)
        file = scenario_file(self.model)
        save_scenarios(scenarios, file)
        self.options.say(
            f"{counted(len(scenarios.train), 'scenario')} to train on, {len(scenarios.eval)} held out, kept in {file}"
        )
        if few := few_held_out(scenarios, self.options.count, file):
            self.options.say(few)
        return scenarios

    def _generation_options(self) -> list[str]:
        """The options that were set and that only matter where scenarios are generated."""
        names = ("count", "llm")
        return [name for name in names if getattr(self.options, name) != getattr(MCPTrainerOptions, name)]

    async def _generated(self, pool: ServerPool) -> ScenarioSet:
        say, options = self.options.say, self.options
        say(f"making scenarios for {one_line(self.target.shown())}")
        with budget() as spent:
            scenarios = await generate_scenarios(
                pool, count=options.count, seed=options.seed, llm=options.llm, progress=say
            )
        for line in spent.lines():
            say(line)
        return scenarios

    def _rollout(self, pool: ServerPool) -> McpRollout:
        return McpRollout(pool, self._loop(), self._max_tools, self._defaults.result_chars)

    @property
    def completion_tokens(self) -> int:
        """Of one message, in rollouts, evaluations and comparisons."""
        return self._training.get("max_completion_tokens", self._defaults.max_completion_tokens)

    def _loop(self) -> LoopOptions:
        return LoopOptions(self.options.max_turns, self.options.temperature)

    def _trainer_options(self, scenarios: ScenarioSet | None, steps: int) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "concurrency": self.concurrency,
            "config": default_config(self.model.base_model, steps),
            "group_size": self.options.group_size,
            "max_completion_tokens": self.completion_tokens,
            "scenarios_per_step": self._defaults.scenarios_per_step,
        }
        options = {**defaults, **self._training}
        if scenarios is not None and scenarios.eval:
            options["eval"] = scenarios.eval
        if scenarios is not None and (judge := self.options.judge) is not None:
            unused = unused_judge(scenarios.scenarios, judge)
            options["judge"] = None if unused else ScenarioJudge(judge, scenarios.scenarios)
        return options


def plan_lines(
    pool: ServerPool,
    model: TrainableModel,
    scenarios: ScenarioSet | str,
    steps: int,
    options: Mapping[str, Any],
    loop: LoopOptions,
    max_tools: int | None,
) -> list[str]:
    """A line per stage. `scenarios` is a sentence if there are none yet."""
    offered, left_out = len(pool.toolset.tools), pool.toolset.left_out
    shown = "all are shown"
    if max_tools is not None and offered > max_tools:
        shown = f"a rollout sees at most {max_tools}: its scenario's, and others"
    group, per_step = options.get("group_size"), options.get("scenarios_per_step", 0)
    lines = [
        f"target     {one_line(pool.target.shown())}",
        f"tools      {offered}; {shown}; {pool.sharing()}",
        *(f"           not called: {one_line(name, 64)} ({reason})" for name, reason in left_out.items()),
        f"scenarios  {scenarios if isinstance(scenarios, str) else _scenarios(scenarios)}",
        f"model      {model.name} on {model.base_model}, {model.backend!r}",
        f"steps      {steps}, each {counted(per_step, 'scenario')} x {group} rollouts, {options.get('concurrency')} at once, "
        f"at most {loop.max_turns} turns",
        f"judge      {'an LLM' if options.get('judge') else 'none: rewards come from execution'}",
    ]
    if not isinstance(scenarios, str) and (change := scenarios.server_change(pool.fingerprint)):
        lines.append(f"warning    {change}")
    return lines


def _scenarios(scenarios: ScenarioSet) -> str:
    by_tool = Counter(tool for scenario in scenarios.scenarios for tool in scenario.tools)
    return (
        f"{len(scenarios.train)} to train on, {len(scenarios.eval)} held out, hash {scenarios.digest[:16]}\n"
        f"           by tool: {', '.join(f'{one_line(name, 64)} {count}' for name, count in sorted(by_tool.items()))}"
    )
