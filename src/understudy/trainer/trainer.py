"""The training loop, readable top to bottom: scenarios -> rollouts -> rewards -> train -> evaluate."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypedDict, Unpack

from understudy.client.gather import gather_trajectory_groups
from understudy.client.model import TrainableModel
from understudy.client.sampling import at_temperature
from understudy.config import TrainConfig
from understudy.contracts import Judge, TraceSink
from understudy.errors import ConfigError, RolloutError, WrongLoopError
from understudy.rewards.outcome import as_reward
from understudy.scenarios.identity import scenario_id
from understudy.scenarios.ordering import batch
from understudy.tracing.fanout import FanOut
from understudy.types import Trajectory, TrajectoryGroup

from .evaluate import Evaluation, mean, summarise
from .progress import Progress, StepRow, make_progress
from .report import Iteration, Stopped, TrainReport, causes, make_iteration

log = logging.getLogger("understudy")

RolloutFunction = Callable[[TrainableModel, object], Awaitable[Trajectory]]
"""(model, scenario) -> the finished trajectory; an exception leaves the rollout unscored."""
RewardFunction = Callable[[object, Trajectory], object]
"""(scenario, trajectory) -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async."""


Schedule = Callable[[int], TrainConfig]
"""The step about to be made, from 1 on -> its options: for a learning rate that falls, say."""


class TrainerOptions(TypedDict, total=False):
    """The options of a Trainer; their defaults and meanings are those of `Options`."""

    reward: RewardFunction | None
    judge: Judge | None
    eval: Sequence[object] | None
    eval_every: int
    group_size: int
    scenarios_per_step: int
    concurrency: int
    timeout: float
    retries: int
    config: TrainConfig | Schedule
    patience: int
    target_reward: float
    seed: int
    sinks: Sequence[TraceSink]
    progress: Progress | None


@dataclass(frozen=True)
class Options:
    """How a run goes; each option once. Raises ConfigError."""

    reward: RewardFunction | None = None  # None: the rollout sets it
    judge: Judge | None = None  # scores each group after its rollouts
    eval: Sequence[object] | None = None  # scenarios that are run before and after, greedily
    eval_every: int = 0  # and after every so many steps; 0: not in between
    group_size: int = 8  # rollouts of one scenario, compared with each other
    scenarios_per_step: int = 4
    concurrency: int = 32  # rollouts at once
    timeout: float = 300.0  # seconds per rollout
    retries: int = 0  # how often a rollout that fails is run again
    config: TrainConfig | Schedule = field(default_factory=TrainConfig)  # or what it is for each step
    patience: int = 10  # iterations in a row without a signal after which the run stops
    target_reward: float = 1.0  # a run that stops so is solved when its mean reward has reached this
    seed: int = 0  # of the order of scenarios
    sinks: Sequence[TraceSink] = ()
    progress: Progress | None = None  # None: a live table in a terminal, else plain lines

    def __post_init__(self) -> None:
        least = {
            "group_size": 2,
            "scenarios_per_step": 1,
            "concurrency": 1,
            "patience": 1,
            "eval_every": 0,
            "retries": 0,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < bound:
                raise ConfigError(f"{name}: a whole number of at least {bound} is needed, got {value!r}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout: seconds above 0 are needed, got {self.timeout!r}")
        if not isinstance(self.config, TrainConfig) and not callable(self.config):
            raise ConfigError(
                f"config: a TrainConfig, or a function from the step to one, is needed, got {self.config!r}"
            )


class Trainer:
    """Trains `model` on rollouts of `scenarios`; the options are those of `Options`."""

    def __init__(
        self,
        model: TrainableModel,
        rollout: RolloutFunction,
        scenarios: Sequence[object],
        **options: Unpack[TrainerOptions],
    ) -> None:
        unknown = sorted(set(options) - {each.name for each in fields(Options)})
        if unknown:
            raise ConfigError(
                f"there is no option {unknown[0]!r}: beside `steps` there are {', '.join(each.name for each in fields(Options))}"
            )
        self.model = model
        self.options = Options(**options)
        self._rollout = rollout
        self._scenarios = checked_scenarios(scenarios, "scenarios")
        self._eval = checked_scenarios(self.options.eval, "eval") if self.options.eval is not None else []
        self._sinks = FanOut(self.options.sinks)

    def train(self, steps: int) -> TrainReport:
        """`atrain`, outside an event loop."""
        refuse_running_loop("train", "atrain")
        return asyncio.run(self.atrain(steps))

    async def atrain(self, steps: int) -> TrainReport:
        """Train until the model has made `steps` steps in all; a model that has is left as it is."""
        if steps < 1:
            raise ConfigError(f"steps: at least 1 is needed, got {steps!r}")
        started = await self.model.get_step()
        progress = self.options.progress or make_progress(steps)
        if started >= steps:
            self._sinks.close()
            report = await self._report(started, started, Stopped.NOTHING_LEFT, [], [])
            progress.say(closing_line(report, self.options))
            return report
        evaluations: list[Evaluation] = []
        iterations: list[Iteration] = []
        stopped = Stopped.FINISHED
        step = started
        with progress:
            try:
                await self._evaluate_into(evaluations, step, progress)
                while step < steps:
                    iteration = await self._iterate(started + len(iterations), step, progress)
                    iterations.append(iteration)
                    step = iteration.step
                    progress.finished(table_row(iteration))
                    verdict = self._verdict(iterations)
                    if verdict is not None:
                        stopped = verdict
                        break
                    every = self.options.eval_every
                    if every and iteration.applied and step % every == 0 and step < steps:
                        await self._evaluate_into(evaluations, step, progress)
                await self._evaluate_into(evaluations, step, progress)
            except (asyncio.CancelledError, KeyboardInterrupt):
                progress.say(f"interrupted after step {step} of {steps}: run the same again to go on from there")
                raise
            finally:
                self._sinks.close()
        report = await self._report(started, step, stopped, iterations, evaluations)
        progress.say(closing_line(report, self.options))
        return report

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
        sampled at 1, as the agent asks at None."""
        chosen = checked_scenarios(scenarios, "scenarios") if scenarios is not None else self._eval
        if not chosen:
            raise ConfigError("eval: no scenarios to evaluate on; pass some, or give the Trainer eval=")
        step = await self.model.get_step()
        with at_temperature(temperature):
            groups = await self._gather(chosen, rollouts)
        if self.options.judge is not None:
            groups = await judged(groups, self.options.judge)
        evaluation = summarise(groups, step, temperature)
        if not evaluation.scored:
            raise RolloutError(f"evaluation at step {step}: no rollout was scored: {causes(groups)}")
        split = "val" if temperature == 0 else "val-sampled"
        self._sinks.groups_finished(groups, step, split)
        await self.model.log(groups, metrics=evaluation.as_metrics(), split=split, step=step)
        return evaluation

    async def _iterate(self, number: int, step: int, progress: Progress) -> Iteration:
        """One iteration: rollouts, rewards, one train request."""
        scenarios = batch(self._scenarios, self.options.scenarios_per_step, number, self.options.seed)
        began = time.monotonic()
        progress.doing(f"{len(scenarios) * self.options.group_size} rollouts with step {step}")
        groups = await self._gather(scenarios, self.options.group_size)
        if self.options.judge is not None:
            progress.doing("judging")
            groups = await judged(groups, self.options.judge)
        if not any(trajectory.reward is not None for group in groups for trajectory in group):
            raise RolloutError(f"after step {step}: no rollout was scored, so nothing can be trained: {causes(groups)}")
        rolled = time.monotonic()
        self._sinks.groups_finished(groups, step, "train")
        progress.doing(f"training step {step + 1}")
        config = self.options.config
        if not isinstance(config, TrainConfig):
            config = config(step + 1)
        result = await self.model.train(groups, config=config, pbar_desc=None)
        iteration = make_iteration(groups, result, rolled - began, time.monotonic() - rolled)
        for warning in result.warnings:
            progress.say(f"warning: {warning}")
        self._sinks.step_finished(result.step, {**result.metrics, "reward": iteration.reward})
        return iteration

    async def _gather(self, scenarios: Sequence[object], rollouts: int) -> list[TrajectoryGroup]:
        """The finished groups, one per scenario. Failed rollouts are kept with their exceptions."""
        return await gather_trajectory_groups(
            (
                TrajectoryGroup([partial(self._scored, scenario)] * rollouts, metadata=named(scenario))
                for scenario in scenarios
            ),
            pbar_desc=None,
            concurrency=self.options.concurrency,
            timeout=self.options.timeout,
            retries=self.options.retries,
            max_exceptions=len(scenarios) * rollouts,
        )

    async def _scored(self, scenario: object) -> Trajectory:
        """One rollout with its reward; a failed one has none. One that returns its exception is run again here, one that
        raises by `_gather`."""
        trajectory = await self._rollout(self.model, scenario)
        for _ in range(self.options.retries):
            if not isinstance(trajectory, Trajectory) or trajectory.exception is None:  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                break
            trajectory = await self._rollout(self.model, scenario)
        if not isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]
            return trajectory  # refused by what gathers it
        if trajectory.exception is not None:
            trajectory.reward = None
        elif self.options.reward is not None:
            value = self.options.reward(scenario, trajectory)
            result = as_reward(await value if inspect.isawaitable(value) else value, "reward=")
            trajectory.reward = result.reward
            trajectory.metrics.update(result.metrics)
        return trajectory

    async def _evaluate_into(self, evaluations: list[Evaluation], step: int, progress: Progress) -> None:
        """Evaluate greedily, where there is something to evaluate on and this step was not yet."""
        if self._eval and (not evaluations or evaluations[-1].step != step):
            progress.doing(f"evaluating step {step} on {len(self._eval)} scenarios")
            evaluations.append(await self.aevaluate())
            progress.say(evaluation_line(evaluations[-1]))

    def _verdict(self, iterations: Sequence[Iteration]) -> Stopped | None:
        """Whether the last iterations say that going on is of no use."""
        last = iterations[-self.options.patience :]
        if len(last) < self.options.patience or any(iteration.applied for iteration in last):
            return None
        reward = mean([iteration.reward for iteration in last])
        return Stopped.SOLVED if reward >= self.options.target_reward else Stopped.NO_SIGNAL

    async def _report(
        self, started: int, step: int, stopped: Stopped, iterations: list[Iteration], evaluations: list[Evaluation]
    ) -> TrainReport:
        saved = await self.model.checkpoints()
        checkpoint = saved[-1].path if saved else None
        return TrainReport(self.model.name, started, step, stopped, tuple(iterations), tuple(evaluations), checkpoint)


async def judged(groups: Sequence[TrajectoryGroup], judge: Judge) -> list[TrajectoryGroup]:
    """The groups with the judge's rewards; a failed rollout stays unscored. A group whose judge fails twice or gives None
    is dropped: its rollouts become unscored, and say why."""

    async def asked(group: TrajectoryGroup) -> TrajectoryGroup | None:
        try:
            return await judge(group)
        except Exception:  # whatever it was, a judge is asked once more
            log.warning("the judge failed and is asked again", exc_info=True)
        return await judge(group)

    answers = await asyncio.gather(*(asked(group) for group in groups), return_exceptions=True)
    kept: list[TrajectoryGroup] = []
    for group, answer in zip(groups, answers, strict=True):
        if isinstance(answer, TrajectoryGroup):
            for trajectory in answer:
                if trajectory.exception is not None:
                    trajectory.reward = None
            kept.append(answer)
            continue
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer
        why = "the judge gave no scores" if answer is None else f"the judge failed: {answer!r}"
        for trajectory in group:
            trajectory.reward = None
            trajectory.log(why)
        group.logs.append(why)
        kept.append(group)
    return kept


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
    twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise ConfigError(f"{option}: scenario ids must differ; these come twice: {', '.join(twice[:5])}")
    return found


def named(scenario: object) -> dict[str, object]:
    """A group's metadata."""
    return {"scenario_id": scenario_id(scenario)}


def table_row(iteration: Iteration) -> StepRow:
    """An iteration as the table shows it."""
    notes = [] if iteration.applied else ["no signal: all rewards of each group are equal"]
    notes += [f"{iteration.failed} rollouts failed"] if iteration.failed else []
    return StepRow(
        step=iteration.step,
        reward=iteration.reward,
        success=iteration.success,
        rollout_seconds=iteration.rollout_seconds,
        train_seconds=iteration.train_seconds,
        tokens=iteration.metrics.get("tokens/trained"),
        kl=iteration.metrics.get("kl/sampler_learner"),
        note="; ".join(notes),
    )


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in one line."""
    kind = "greedy" if evaluation.temperature == 0 else "sampled"
    success = "" if evaluation.success is None else f"success {evaluation.success:.0%}, "
    failed = f", {evaluation.failed} rollouts failed" if evaluation.failed else ""
    reward = f"reward {evaluation.reward or 0.0:.3f} ± {evaluation.reward_error:.3f}"
    return f"step {evaluation.step}, {kind}, {evaluation.scored} scenarios: {success}{reward}{failed}"


def closing_line(report: TrainReport, options: Options) -> str:
    """Why the run ended, and where its LoRA is."""
    reason = {
        Stopped.FINISHED: f"{report.model} is at step {report.step}",
        Stopped.NOTHING_LEFT: f"{report.model} is at step {report.step}: nothing is left to train",
        Stopped.SOLVED: f"{report.model} is solved at step {report.step}: every rollout of a scenario earns the same, "
        f"and the mean reward has reached {options.target_reward:g}",
        Stopped.NO_SIGNAL: f"{report.model} stopped at step {report.step}: for {options.patience} iterations all rewards "
        "of each group were equal. Raise group_size or the temperature, take scenarios of another difficulty, or give "
        "partial rewards",
    }.get(report.stopped, report.stopped.value)
    return f"{reason}. The LoRA is in {report.checkpoint}" if report.checkpoint else f"{reason}. No step was applied"
