"""The training loop: scenarios -> rollouts -> rewards -> train -> evaluate. `Trainer._iterate` is the loop itself."""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from offbook.base.console import Terminal
from offbook.base.errors import BudgetExceeded, ConfigError, OffbookError, RolloutError
from offbook.base.option_names import names_checked
from offbook.base.options import takes
from offbook.base.sync_calls import run_sync
from offbook.base.text import counted
from offbook.base.types import RolloutPlace, Trajectory, TrajectoryGroup
from offbook.base.user_values import as_list
from offbook.client.model import TrainableModel
from offbook.client.rollouts.capture import at_temperature, completions_limited, logged_reward
from offbook.client.rollouts.dataset import unpadded
from offbook.client.rollouts.gather import gather_trajectory_groups
from offbook.contracts import Judge
from offbook.rewards.reward_result import as_reward
from offbook.scenarios.identity import scenario_id

from .evaluate import Evaluation, failures_printed, steps_line, summarise
from .imitation import Replay
from .judging import judged
from .messages import (
    closing_line,
    evaluation_failures_line,
    failure_lines,
    interrupted_line,
    step_note,
    unscored_causes,
    warnings_of,
    watch_line,
)
from .models import (
    CostLog,
    check_choices,
    checked_models,
    log_to_each,
    logged_costs,
    save_rollouts,
    save_rollouts_after,
    settled_steps_of,
    steps_of,
    train_each,
)
from .options import TrainerOptions, check_evaluation, check_place, load_runner
from .progress import PlainProgress
from .report import ModelReport, Stopped, TrainReport, make_iteration
from .run import RolloutBatch, Run, Steps, UpdateQueue, announced, batch, run_name
from .sink_publisher import SinkPublisher

logger = logging.getLogger("offbook")

RolloutFunction = Callable[[Any, Any], Awaitable[Trajectory]]
"""(model, or with several the tuple of them; scenario) -> the finished trajectory. If it raises, the rollout is unscored."""


@dataclass(frozen=True)
class TrainerArguments(TrainerOptions):
    """The arguments of a Trainer."""

    model: TrainableModel | Sequence[TrainableModel]
    rollout: RolloutFunction
    scenarios: Iterable[object]


class Trainer:
    """Trains one or several models on rollouts of `scenarios`. Several models play different roles in the same
    rollouts; each learns from its own calls. For the options see `TrainerOptions`. Raises ConfigError."""

    @takes(TrainerArguments, "Trainer")
    def __init__(self, options: TrainerArguments) -> None:
        self.models = checked_models(options.model)
        self.model = self.models[0]
        self.options = options
        self._runner = load_runner(options.runner)
        self._rollout = options.rollout if self._runner is None else partial(self._runner.run, options.rollout)
        self._rollout_argument = options.model if isinstance(options.model, TrainableModel) else self.models
        self.scenarios = checked_scenarios(options.scenarios, "scenarios")
        self._eval = checked_scenarios(options.eval, "eval") if options.eval is not None else []
        self._publisher = SinkPublisher(self.models, options)

    @names_checked("Trainer.train")
    def train(self, steps: int) -> TrainReport:
        """The sync form of `atrain`. Raises WrongLoopError inside a running event loop."""
        return run_sync(self.atrain, steps)

    @names_checked("Trainer.atrain")
    async def atrain(self, steps: int) -> TrainReport:
        """Train until every model has reached step `steps`, counted from its step 0. The run may stop earlier; see
        `Stopped`. Raises ConfigError, and RolloutError if no rollout of an iteration is scored."""
        if not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"steps: a whole number of at least 1 is needed, got {steps!r}")
        progress = self.options.progress or PlainProgress(Terminal(), steps)
        started = await settled_steps_of(self.models, progress.say)
        name = self.options.run or run_name("train", self.model.name)
        replay = Replay(self.models, self.options.replayed, self.options.seed)
        run = Run(self.options, steps, started, started, progress, name, replay)
        if run.stopped() is Stopped.FINISHED:
            return await self._ended(run, Stopped.NOTHING_LEFT)
        await self._publisher.started(run.id, started[self.model.name])
        async with logged_costs(self.model, self.options.max_cost) as costs:
            run.spending = costs.spending
            run.progress.say(watch_line(self.models, run.id))
            try:
                stopped = await announced(self._iterate(run, costs), lambda: run.progress.say(interrupted_line(run)))
                await (await self.model.api()).end_run(run.id)
            finally:
                for line in self._publisher.close():
                    run.progress.say(line)
        return await self._ended(run, stopped)

    @names_checked("Trainer.evaluate")
    def evaluate(
        self, scenarios: Iterable[object] | None = None, *, temperature: float | None = 0.0, rollouts: int = 1
    ) -> Evaluation:
        """The sync form of `aevaluate`. Raises WrongLoopError inside a running event loop."""
        return run_sync(self.aevaluate, scenarios, temperature=temperature, rollouts=rollouts)

    @names_checked("Trainer.aevaluate")
    async def aevaluate(
        self, scenarios: Iterable[object] | None = None, *, temperature: float | None = 0.0, rollouts: int = 1
    ) -> Evaluation:
        """Run every scenario (default: `eval`) `rollouts` times with the newest step, and log the result with every
        model. `temperature`: 0 is greedy, None the agent's own. Raises ConfigError; RolloutError if no rollout is
        scored."""
        check_evaluation(temperature, rollouts)
        chosen = checked_scenarios(scenarios, "scenarios") if scenarios is not None else self._eval
        if not chosen:
            raise ConfigError("eval: no scenarios to evaluate on; pass some, or give the Trainer eval=")
        run = self.options.run or run_name("eval", self.model.name)
        await self._publisher.started(run, await self.model.get_step())
        try:
            async with logged_costs(self.model, self.options.max_cost) as costs:
                evaluation = await self._evaluate(chosen, temperature, rollouts, run, costs)
            if evaluation.failed and not failures_printed():
                logger.warning(evaluation_failures_line(evaluation))
            return evaluation
        finally:
            for line in self._publisher.close():
                logger.warning(line)

    async def _evaluate(
        self, scenarios: Sequence[object], temperature: float | None, rollouts: int, run: str, costs: CostLog
    ) -> Evaluation:
        """`aevaluate` as a part of run `run`. The server keeps the rollouts even if none is scored."""
        steps = await steps_of(self.models)
        split = "val" if temperature == 0 else "val-sampled"
        place = RolloutPlace(run=run, split=split, step=steps[self.model.name])
        with at_temperature(temperature):
            groups = await self._gather(scenarios, rollouts, self._rollout, place)
        costs.belong_to(groups, steps[self.model.name])
        self.examine_evaluation(groups)
        if self.options.judge is not None:
            groups = await self._judged(groups, self.options.judge)
        evaluation = summarise(groups, steps, temperature)
        if not evaluation.scored:
            unscored = RolloutError(
                f"evaluation at {steps_line(steps)}: no rollout was scored: {unscored_causes(groups)}"
            )
            await save_rollouts_after(unscored, self.models, groups)
            raise unscored
        await self._publisher.groups(groups, evaluation.step, split)
        await costs.log()
        await log_to_each(self.models, groups, evaluation.as_metrics(), split, steps)
        self._publisher.evaluation(evaluation, groups, split)
        return evaluation

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Hook for subclasses, called with the rollouts of every iteration before they are trained. Returns a line to
        print, or None. An exception ends the run."""

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Hook for subclasses, called with the rollouts of every evaluation. An exception ends the run."""

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """Hook for subclasses: the scenarios of iteration `number`, counted from 0 at the model's step 0."""
        return batch(scenarios, self.options.scenarios_per_step, number, self.options.seed)

    async def _iterate(self, run: Run, costs: CostLog) -> Stopped:
        """Repeat rollouts and their update until the run is over. With overlap, rollouts start while earlier updates
        run. On an error, it waits for started updates; no task is left running when it raises."""
        updates = UpdateQueue()
        try:
            await self._evaluate_new(run, costs)
            while True:
                if not run.under_way:
                    stopped = run.stopped()
                    if stopped is not None:
                        break
                    await self._evaluate_due(run, costs)
                if not run.may_begin():
                    await updates.one_ended()
                    continue
                scored = await updates.beside(self._rollouts(run, costs))
                if run.evaluation_ahead():
                    await updates.all_ended()
                await self._evaluate_due(run, costs)
                run.under_way.append(scored)
                updates.add(partial(self._update, run, scored))
            await self._evaluate_new(run, costs)
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
                rollouts = counted(sum(batch.rollouts for batch in run.under_way), "finished rollout")
                error.add_note(f"not trained: {rollouts}; their calls stay on the server")
            raise
        finally:
            await updates.cancel()

    async def _rollouts(self, run: Run, costs: CostLog) -> RolloutBatch:
        """Run the rollouts of the next iteration and compute their rewards."""
        scenarios = await self.next_scenarios(self.scenarios, run.number)
        spent_before = run.spending.by_purpose()
        first, began, started = run.current, dict[str, Steps](), time.monotonic()

        async def noted(model: Any, scenario: Any) -> Trajectory:
            steps = run.current
            trajectory = await self._rollout(model, scenario)
            if isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                began[trajectory.id] = steps
            return trajectory

        with run.doing(f"{counted(len(scenarios) * self.options.group_size, 'rollout')} with {steps_line(first)}"):
            place = RolloutPlace(run=run.id, split="train", step=first[self.model.name])
            groups = await self._gather(scenarios, self.options.group_size, noted, place)
        costs.belong_to(groups, first[self.model.name])
        if line := self.examine_rollouts(groups):
            run.progress.say(line)
        if self.options.judge is not None:
            with run.doing("judging"):
                groups = await self._judged(groups, self.options.judge)
        if not any(trajectory.reward is not None for group in groups for trajectory in group):
            unscored = RolloutError(
                f"after {steps_line(first)}: no rollout was scored, so nothing can be trained: {unscored_causes(groups)}"
            )
            await save_rollouts_after(unscored, self.models, groups)
            raise unscored
        await self._publisher.groups(groups, first[self.model.name], "train")
        seconds, spent = time.monotonic() - started, run.spending.metrics(spent_before)
        if run.under_way or spent:
            await save_rollouts(self.models, groups)
        await costs.log()
        return RolloutBatch(groups, first, began, seconds, spent)

    async def _update(self, run: Run, scored: RolloutBatch) -> None:
        """Send one train request per model below the target step, and record the iteration."""
        configs = run.configs()
        began = time.monotonic()
        with run.doing("training " + " and ".join(f"step {run.current[name] + 1} of {name}" for name in configs)):
            replayed = await run.replay.drawn(configs, scored.groups, run.current)
            steps = await train_each(self.models, scored.groups, run.current, configs, replayed)
            run.replay.add(scored.groups)
        if any(config.overlap for config in configs.values()):
            steps = run.overlapped(scored, steps)
        seconds = time.monotonic() - began
        iteration = make_iteration(scored.groups, steps, scored.seconds, seconds, scored.spent)
        iteration = self._publisher.step(iteration, scored.groups, scored.first_began[self.model.name])
        for warning in warnings_of(steps):
            if run.repeats.new(warning):
                run.progress.say(warning)
        run.applied(iteration)
        run.progress.finished(iteration, len(run.iterations), step_note(iteration, run.repeats))
        for line in failure_lines(run.new_failures(iteration.failures)):
            run.progress.say(line)
        if self.options.keep_checkpoints is not None:
            await self._delete_old(run, self.options.keep_checkpoints)

    async def _delete_old(self, run: Run, keep: int) -> None:
        """Delete old checkpoints. Those that rollouts under way may use stay, and so do those that a run names."""
        for model in self.models:
            config = run.configs().get(model.name)
            staleness = config.max_staleness if config is not None and config.overlap else 0
            teacher = config.distill.teacher if config is not None and config.distill is not None else ""
            owner, _, step = teacher.partition("@")
            named = {int(step)} if owner == model.name and step.isdecimal() else set[int]()
            try:
                await model.keep_checkpoints(max(keep, staleness + 1), named)
            except OffbookError as error:
                line = f"old checkpoints of {model.name} were not deleted: {error}"
                if run.repeats.new(line):
                    run.progress.say(line)

    async def _judged(self, groups: list[TrajectoryGroup], judge: Judge) -> list[TrajectoryGroup]:
        """The groups with the judge's rewards. The rollouts are stored first, because a judge is slow and may fail."""
        await save_rollouts(self.models, groups)
        return await judged(groups, judge)

    async def _gather(
        self, scenarios: Sequence[object], rollouts: int, rollout: RolloutFunction, place: RolloutPlace
    ) -> list[TrajectoryGroup]:
        """Run `rollouts` rollouts per scenario. Returns one group per scenario, which includes failed rollouts."""

        def pending(scenario: object) -> TrajectoryGroup:
            name = scenario_id(scenario)
            own = RolloutPlace(scenario=name).filled(place)
            copies = [partial(self._scored, rollout, scenario)] * rollouts
            return TrajectoryGroup(copies, metadata={"scenario_id": name}, place=own)

        concurrency = self.options.concurrency
        if self._runner is not None:
            concurrency = min(concurrency, await self._runner.slots())
        with completions_limited(self.options.max_completion_tokens):
            groups = await gather_trajectory_groups(
                [pending(scenario) for scenario in scenarios],
                pbar_desc=None,
                concurrency=concurrency,
                timeout=self.options.timeout,
                retries=self.options.retries,
                max_exceptions=len(scenarios) * rollouts,
            )
        check_choices(self.models, groups)
        return groups

    async def _scored(self, rollout: RolloutFunction, scenario: object) -> Trajectory:
        """Run one rollout and compute its reward; None if it failed. A rollout that returns an exception is retried
        here; one that raises is retried by `_gather`."""
        trajectory = await rollout(self._rollout_argument, scenario)
        for _ in range(self.options.retries):
            if not isinstance(trajectory, Trajectory) or trajectory.exception is None:  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                break
            trajectory = await rollout(self._rollout_argument, scenario)
        if not isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]
            return trajectory  # gather_trajectory_groups rejects it
        if trajectory.exception is not None:
            trajectory.reward = None
        elif self.options.reward is not None:
            value = self.options.reward(scenario, trajectory)
            result = as_reward(await value if inspect.isawaitable(value) else value, "reward=")
            trajectory.reward = result.reward + (logged_reward(trajectory) or 0.0)
            trajectory.metrics.update(result.metrics)
        return trajectory

    async def _evaluate_due(self, run: Run, costs: CostLog) -> None:
        if not run.under_way and run.evaluation_due():
            await self._evaluate_new(run, costs)

    async def _evaluate_new(self, run: Run, costs: CostLog) -> None:
        """Evaluate greedily, if there are `eval` scenarios and the current steps were not evaluated yet. No update may
        be under way, so that all rollouts use the same steps."""
        if self._eval and (not run.evaluations or run.evaluations[-1].steps != run.current):
            with run.doing(f"evaluating {steps_line(run.current)} on {counted(len(self._eval), 'scenario')}"):
                run.evaluations.append(await self._evaluate(self._eval, 0.0, 1, run.id, costs))
            run.progress.say(str(run.evaluations[-1]))
            for line in failure_lines(run.new_failures(run.evaluations[-1].failures)):
                run.progress.say(line)

    async def _ended(self, run: Run, stopped: Stopped) -> TrainReport:
        models: dict[str, ModelReport] = {}
        for model in self.models:
            saved = await model.checkpoints()
            models[model.name] = ModelReport(
                run.started[model.name], run.current[model.name], saved[-1].path if saved else None
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
        for line in (*run.repeats.repeated(), *run.spending.lines()):
            run.progress.say(line)
        run.progress.say(closing_line(report, self.options.patience, self.options.target_reward))
        return report


def checked_scenarios(scenarios: Iterable[object], option: str) -> list[object]:
    """The scenarios as a list, read once. Raises ConfigError, which names `option`, for what is no collection of
    scenarios, for no scenario, and for duplicate ids."""
    checked = as_list(unpadded(scenarios), option)
    if not checked:
        raise ConfigError(f"{option}: at least one scenario is needed")
    ids = [scenario_id(scenario) for scenario in checked]
    for name in ids:
        check_place(f"{option}: the id of a scenario", name)
    if twice := sorted(name for name, times in Counter(ids).items() if times > 1):
        raise ConfigError(f"{option}: scenarios must differ; these appear twice: {', '.join(twice[:5])}")
    return checked
