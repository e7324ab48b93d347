"""The training loop, readable top to bottom: scenarios -> rollouts -> rewards -> train -> evaluate."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Unpack, overload

from understudy.client.capture import logged_reward
from understudy.client.gather import gather_trajectory_groups
from understudy.client.model import TrainableModel
from understudy.client.sampling import at_temperature, completions_limited
from understudy.contracts import Judge
from understudy.errors import BudgetExceeded, ConfigError, RolloutError, WrongLoopError
from understudy.llms.ledger import budget
from understudy.rewards.outcome import as_reward
from understudy.scenarios.identity import scenario_id
from understudy.scenarios.ordering import batch
from understudy.tracing.trace_context import keep_trace_context
from understudy.types import RolloutPlace, Trajectory, TrajectoryGroup, new_id

from .evaluate import Evaluation, summarise
from .judging import judged
from .messages import (
    closing_line,
    evaluation_line,
    failure_lines,
    interrupted_line,
    overlap_line,
    steps_line,
    table_row,
    unscored_causes,
    untrained_line,
    warnings_of,
)
from .models import check_choices, checked_models, keep, keep_beside, log_spent, log_to_each, steps_of, train_each
from .options import RunOptions, TrainerOptions, check_place, is_number
from .progress import make_progress
from .report import ModelReport, Stopped, TrainReport, make_iteration
from .run import RolloutBatch, Run, Steps
from .showing import Showing
from .updates import Updates

log = logging.getLogger("understudy")

RolloutFunction = Callable[[TrainableModel, Any], Awaitable[Trajectory]]
"""(model, scenario) -> the finished trajectory; an exception leaves the rollout unscored."""
TeamRolloutFunction = Callable[[tuple[TrainableModel, ...], Any], Awaitable[Trajectory]]
"""(models, scenario) -> the same, for a Trainer that was given several models, in their order."""
AnyRollout = Callable[[Any, Any], Awaitable[Trajectory]]


class Trainer:
    """Trains `model`, or several models that play different parts, on rollouts of `scenarios`; the options are those of
    `RunOptions`. Each of several models learns from its own calls in the same rollouts."""

    @overload
    def __init__(
        self,
        model: TrainableModel,
        rollout: RolloutFunction,
        scenarios: Sequence[object],
        **options: Unpack[TrainerOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: Sequence[TrainableModel],
        rollout: TeamRolloutFunction,
        scenarios: Sequence[object],
        **options: Unpack[TrainerOptions],
    ) -> None: ...

    def __init__(
        self,
        model: TrainableModel | Sequence[TrainableModel],
        rollout: AnyRollout,
        scenarios: Sequence[object],
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.models = checked_models(model)
        self.model = self.models[0]
        self.options = RunOptions.parse(**options)
        self._rollout = rollout
        self._given = model if isinstance(model, TrainableModel) else self.models
        self._scenarios = checked_scenarios(scenarios, "scenarios")
        self._eval = checked_scenarios(self.options.eval, "eval") if self.options.eval is not None else []
        self._shown = Showing(self.models, self.options)

    def train(self, steps: int) -> TrainReport:
        """`atrain`, outside an event loop."""
        refuse_running_loop("train", "atrain")
        return asyncio.run(self.atrain(steps))

    async def atrain(self, steps: int) -> TrainReport:
        """Train until each model has made `steps` steps in all; one that has is left as it is."""
        if not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"steps: a whole number of at least 1 is needed, got {steps!r}")
        started = await steps_of(self.models)
        progress = self.options.progress or make_progress(steps)
        run = Run(self.options, steps, started, started, progress, self._run_id())
        if run.stopped() is Stopped.FINISHED:
            return await self._ended(run, Stopped.NOTHING_LEFT)
        await self._shown.started(run.id, started[self.model.name])
        with run.progress, budget(self.options.max_cost) as run.spending:
            try:
                stopped = await self._iterate(run)
            except (asyncio.CancelledError, KeyboardInterrupt):
                run.progress.say(interrupted_line(run.at, steps, len(run.under_way)))
                raise
            finally:
                for line in self._shown.close():
                    run.progress.say(line)
        return await self._ended(run, stopped)

    def evaluate(
        self, scenarios: Sequence[object] | None = None, *, temperature: float | None = 0.0, rollouts: int = 1
    ) -> Evaluation:
        """`aevaluate`, outside an event loop."""
        refuse_running_loop("evaluate", "aevaluate")
        return asyncio.run(self.aevaluate(scenarios, temperature=temperature, rollouts=rollouts))

    async def aevaluate(
        self, scenarios: Sequence[object] | None = None, *, temperature: float | None = 0.0, rollouts: int = 1
    ) -> Evaluation:
        """Run each scenario (`eval`'s by default) `rollouts` times with the newest step: greedy at temperature 0,
        sampled at 1, as the agent asks at None. Logged with every model."""
        check_evaluation(temperature, rollouts)
        chosen = checked_scenarios(scenarios, "scenarios") if scenarios is not None else self._eval
        if not chosen:
            raise ConfigError("eval: no scenarios to evaluate on; pass some, or give the Trainer eval=")
        run = self._run_id()
        await self._shown.started(run, await self.model.get_step())
        try:
            with budget(self.options.max_cost):
                return await self._evaluate(chosen, temperature, rollouts, run)
        finally:
            for line in self._shown.close():
                log.warning(line)

    async def _evaluate(
        self, scenarios: Sequence[object], temperature: float | None, rollouts: int, run: str
    ) -> Evaluation:
        """`aevaluate`, as a part of a run. Rollouts of which none is scored are kept, too."""
        steps = await steps_of(self.models)
        split = "val" if temperature == 0 else "val-sampled"
        place = RolloutPlace(run=run, split=split, step=steps[self.model.name])
        with at_temperature(temperature):
            groups = await self._gather(scenarios, rollouts, self._rollout, place)
        self.examine_evaluation(groups)
        if self.options.judge is not None:
            groups = await self._judged(groups, self.options.judge)
        evaluation = summarise(groups, steps, temperature)
        if not evaluation.scored:
            unscored = RolloutError(
                f"evaluation at {steps_line(steps)}: no rollout was scored: {unscored_causes(groups)}"
            )
            await keep_beside(unscored, self.models, groups)
            raise unscored
        await self._shown.groups(groups, evaluation.step, split)
        await log_to_each(self.models, groups, evaluation.as_metrics(), split, steps)
        self._shown.evaluation(evaluation, groups, split)
        return evaluation

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """For subclasses: called with the rollouts of each iteration before they are trained; returns a line for the
        progress, raises what ends the run."""

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """For subclasses: the same for the rollouts of an evaluation."""

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """For subclasses: which of the scenarios iteration `number` takes; the model's first one is 0."""
        return batch(scenarios, self.options.scenarios_per_step, number, self.options.seed)

    async def _iterate(self, run: Run) -> Stopped:
        """Rollouts, and their update, until the run is over; with overlap, rollouts begin beside the updates of those before
        them. Whatever it raises, nothing is under way any more, and updates that had begun are awaited before an error."""
        updates = Updates()
        try:
            if said := overlap_line(run.configs().values()):
                run.progress.say(said)
            await self._evaluate_new(run)
            while True:
                if not run.under_way:
                    stopped = run.stopped()
                    if stopped is not None:
                        break
                    await self._evaluate_due(run)
                if not run.may_begin():
                    with run.waiting.running():
                        await updates.one_ended()
                    continue
                scored = await updates.beside(self._rollouts(run))
                if run.evaluation_ahead():
                    await updates.all_ended()
                await self._evaluate_due(run)
                run.under_way.append(scored)
                updates.add(partial(self._update, run, scored))
            await self._evaluate_new(run)
            return stopped
        except BudgetExceeded as error:
            run.progress.say(f"{error}. Rollouts without rewards are kept on the server")
            await updates.all_ended()
            return run.stopped() or Stopped.BUDGET
        except Exception as error:
            if updates.under_way:
                run.progress.say(f"an error ends the run, when the update under way has ended: {error}")
            await updates.settle(error)
            if run.under_way:
                error.add_note(untrained_line(sum(each.rollouts for each in run.under_way)))
            raise
        finally:
            await updates.cancel()

    async def _rollouts(self, run: Run) -> RolloutBatch:
        """The rollouts of the next iteration, with their rewards."""
        scenarios = await self.next_scenarios(self._scenarios, run.number)
        asked = run.spending.by_purpose()
        at, began, started = run.at, dict[str, Steps](), time.monotonic()

        async def noted(model: Any, scenario: Any) -> Trajectory:
            steps = run.at
            trajectory = await self._rollout(model, scenario)
            if isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                began[trajectory.id] = steps
            return trajectory

        with run.rolling.running():
            with run.doing(f"{len(scenarios) * self.options.group_size} rollouts with {steps_line(at)}"):
                place = RolloutPlace(run=run.id, split="train", step=at[self.model.name])
                groups = await self._gather(scenarios, self.options.group_size, noted, place)
            if line := self.examine_rollouts(groups):
                run.progress.say(line)
            if self.options.judge is not None:
                with run.doing("judging"):
                    groups = await self._judged(groups, self.options.judge)
        if not any(trajectory.reward is not None for group in groups for trajectory in group):
            unscored = RolloutError(
                f"after {steps_line(at)}: no rollout was scored, so nothing can be trained: {unscored_causes(groups)}"
            )
            await keep_beside(unscored, self.models, groups)
            raise unscored
        await self._shown.groups(groups, at[self.model.name], "train")
        if run.under_way:
            await keep(self.models, groups)
        return RolloutBatch(
            groups, at, began, time.monotonic() - started, run.waiting.taken(), run.spending.metrics(asked)
        )

    async def _update(self, run: Run, scored: RolloutBatch) -> None:
        """One train request for each model that has not made its steps."""
        configs = run.configs()
        began, rolled = time.monotonic(), run.rolling.seconds
        with run.doing("training " + " and ".join(f"step {run.at[name] + 1} of {name}" for name in configs)):
            made = await train_each(self.models, scored.groups, run.at, configs)
        if any(config.overlap for config in configs.values()):
            made = run.overlapped(scored, made, run.rolling.seconds - rolled)
        seconds = time.monotonic() - began
        iteration = make_iteration(scored.groups, made, scored.seconds, seconds, scored.spent)
        iteration = self._shown.step(iteration, scored.groups, scored.first_began[self.model.name])
        for warning in warnings_of(made):
            run.progress.say(warning)
        run.applied(iteration)
        await log_spent(self.model, scored.groups, iteration.step, scored.spent)
        run.progress.finished(table_row(iteration))
        for line in failure_lines(run.new_failures(iteration.failures)):
            run.progress.say(line)

    async def _judged(self, groups: list[TrajectoryGroup], judge: Judge) -> list[TrajectoryGroup]:
        """The groups with the judge's rewards. The rollouts are kept before: a judge takes long, fails, and drops some."""
        await keep(self.models, groups)
        return await judged(groups, judge)

    def _run_id(self) -> str:
        return self.options.run or new_id("run")

    async def _gather(
        self, scenarios: Sequence[object], rollouts: int, rollout: AnyRollout, place: RolloutPlace
    ) -> list[TrajectoryGroup]:
        """The finished groups, one per scenario. Failed rollouts are kept with their exceptions."""

        def pending(scenario: object) -> TrajectoryGroup:
            name = scenario_id(scenario)
            own = RolloutPlace(scenario=name).filled(place)
            copies = [partial(self._scored, rollout, scenario)] * rollouts
            return TrajectoryGroup(copies, metadata={"scenario_id": name}, place=own)

        with completions_limited(self.options.max_completion_tokens):
            groups = await gather_trajectory_groups(
                [pending(scenario) for scenario in scenarios],
                pbar_desc=None,
                concurrency=self.options.concurrency,
                timeout=self.options.timeout,
                retries=self.options.retries,
                max_exceptions=len(scenarios) * rollouts,
            )
        await check_choices(self.models, groups)
        return groups

    async def _scored(self, rollout: AnyRollout, scenario: object) -> Trajectory:
        """One rollout with its reward; a failed one has none. One that returns its exception is run again here, one that
        raises by `_gather`."""
        trajectory = await rollout(self._given, scenario)
        for _ in range(self.options.retries):
            if not isinstance(trajectory, Trajectory) or trajectory.exception is None:  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                break
            trajectory = await rollout(self._given, scenario)
        if not isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]
            return trajectory  # refused by what gathers it
        keep_trace_context(trajectory)
        if trajectory.exception is not None:
            trajectory.reward = None
        elif self.options.reward is not None:
            value = self.options.reward(scenario, trajectory)
            result = as_reward(await value if inspect.isawaitable(value) else value, "reward=")
            trajectory.reward = result.reward + (logged_reward(trajectory) or 0.0)
            trajectory.metrics.update(result.metrics)
        return trajectory

    async def _evaluate_due(self, run: Run) -> None:
        """Evaluate where an evaluation in between is due. While updates are under way none is: they wait for it."""
        if not run.under_way and run.evaluation_due():
            await self._evaluate_new(run)

    async def _evaluate_new(self, run: Run) -> None:
        """Evaluate greedily, where there is something to evaluate on and these steps were not yet. No update is under way,
        so that all of it is of one step."""
        if self._eval and (not run.evaluations or run.evaluations[-1].steps != run.at):
            with run.doing(f"evaluating {steps_line(run.at)} on {len(self._eval)} scenarios"):
                run.evaluations.append(await self._evaluate(self._eval, 0.0, 1, run.id))
            run.progress.say(evaluation_line(run.evaluations[-1]))
            for line in failure_lines(run.new_failures(run.evaluations[-1].failures)):
                run.progress.say(line)

    async def _ended(self, run: Run, stopped: Stopped) -> TrainReport:
        """The report, whose last line is said."""
        models: dict[str, ModelReport] = {}
        for model in self.models:
            saved = await model.checkpoints()
            models[model.name] = ModelReport(
                run.started[model.name], run.at[model.name], saved[-1].path if saved else None
            )
        first = models[self.model.name]
        report = TrainReport(
            model=self.model.name,
            started=first.started,
            step=first.step,
            stopped=stopped,
            iterations=tuple(run.iterations),
            evaluations=tuple(run.evaluations),
            checkpoint=first.checkpoint,
            models=models,
            run=run.id,
            spending=run.spending.by_purpose(),
        )
        for line in run.spending.lines():
            run.progress.say(line)
        run.progress.say(closing_line(report, self.options.patience, self.options.target_reward))
        return report


def refuse_running_loop(method: str, twin: str) -> None:
    """Raise WrongLoopError inside a running event loop, before any work."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WrongLoopError(method, twin)


def checked_scenarios(scenarios: Sequence[object], option: str) -> list[object]:
    """The scenarios as a list; none, or two of one id, is a ConfigError."""
    found = list(scenarios)
    if not found:
        raise ConfigError(f"{option}: at least one scenario is needed")
    ids = [scenario_id(scenario) for scenario in found]
    for name in ids:
        check_place(f"{option}: the id of a scenario", name)
    twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise ConfigError(f"{option}: scenario ids must differ; these come twice: {', '.join(twice[:5])}")
    return found


def check_evaluation(temperature: float | None, rollouts: int) -> None:
    """Raise ConfigError for options of an evaluation that no sampler could follow."""
    if temperature is not None and not (is_number(temperature) and 0 <= temperature < math.inf):
        raise ConfigError(f"temperature: 0 (greedy), a finite number above, or None is needed, got {temperature!r}")
    if not isinstance(rollouts, int) or rollouts < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise ConfigError(f"rollouts: a whole number of at least 1 is needed, got {rollouts!r}")
