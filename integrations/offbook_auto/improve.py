"""`Improver`: from an app on the model that it has to a trained model in its place, stage by stage. `Improver._stages` is
the order; each stage is a call that can be made alone: `compare`, `train_sft`, `train`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from offbook.base import clock
from offbook.base.errors import BudgetExceeded, ConfigError
from offbook.base.json_files import read_json
from offbook.base.sync_calls import run_sync
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.client.model import TrainableModel
from offbook.contracts import Judge
from offbook.trainer.report import Stopped, TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import ROWS
from offbook_compare.journal import ComparedRollout, Journal
from offbook_compare.report import shown_interval
from offbook_compare.results import CandidateResult, ComparisonReport

from .estimate import StagePlan, tokens_of
from .good_runs import good_runs, with_rewards, write_conversations
from .improve_options import ImproveOptions
from .improve_report import SUPERVISED, CurvePoint, ImproveReport, best_of, own_points, write_report
from .stages import StagesRun, run_stages
from .task import write_whole

ImproveStage = Literal["observe", "sft", "train", "compare"]
STAGES: tuple[ImproveStage, ...] = get_args(ImproveStage)
Split = Literal["train", "held-out"]
GOOD = "good.jsonl"
STATE = "stages.json"
FIRST_RUNS = 8
"""Scenarios that are run before the cost of the others is estimated."""


class ImprovableApp(Protocol):
    """What an Improver improves: an app with its scenarios, whose calls any model can answer."""

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        ...

    @property
    def judge(self) -> Judge | None:
        """What scores runs that have no reward; None: each run has one."""
        ...

    def sizes(self) -> tuple[int, int]:
        """How many scenarios there are to train on, and held out."""
        ...

    def rollouts_per_step(self) -> int:
        """Rollouts of a training step."""
        ...

    async def compared(
        self, split: Split, candidates: Sequence[CandidateLike], *, first: int | None = None, **options: Any
    ) -> ComparisonReport:
        """`offbook_compare.acompare` on the scenarios of a split, or on its first ones."""
        ...

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        ...

    async def forked(self, name: str, step: int) -> ImprovableApp:
        """The app with the model `name` in the place of its own: made from that step, unless it is there."""
        ...


@dataclass
class Progress:
    """What the stages have made so far, and what stages.json keeps of it: the step after the supervised training, and after
    each round. `fork`: the model of the rounds, where the supervised step was worse than the base; "": the app's own. `ended`:
    why no further round follows."""

    sft: int | None = None
    fork: str = ""
    rounds: list[int] = field(default_factory=list[int])
    ended: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    good: str = ""
    curve: list[CurvePoint] = field(default_factory=list[CurvePoint])
    comparison: ComparisonReport | None = None


class Improver:
    """Puts a trained model in the place of the one that an app has: it observes the app, imitates the good runs, goes on
    with reinforcement learning while held-out success rises, and compares with the teacher."""

    def __init__(self, app: ImprovableApp, options: ImproveOptions) -> None:
        self.app = self._own_app = app
        self.options = options
        self.name = app.model.name
        self.folder = options.output or Path(f"improve-{self.name}")
        self.teacher = options.teaching()
        if app.judge is not None and options.observe_rollouts < 2:
            self.options = replace(options, observe_rollouts=4)  # a judge compares runs of one scenario

    def run(self, until: ImproveStage = "compare") -> ImproveReport:
        """The sync form of `arun`. Raises WrongLoopError inside a running event loop."""
        return run_sync(self.arun, until)

    async def arun(self, until: ImproveStage = "compare") -> ImproveReport:
        """Run all stages up to `until` whose results are not there yet, and write report.md.

        A spent `max_cost` ends the run well. Raises ConfigError, and the errors of `compare`, `train_sft` and `Trainer`."""
        if until not in STAGES:
            raise ConfigError(f"until: one of {', '.join(STAGES)} is needed, got {until!r}")
        self.app, progress = self._own_app, self._known()
        stages: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("observe", lambda: self._observe(progress)),
            ("sft", lambda: self._sft(progress)),
            ("train", lambda: self._train(progress)),
            ("compare", lambda: self._compare(progress)),
        ]
        report = self._report(progress, await run_stages(stages, until, self.folder, self.options.max_cost))
        write_report(report, self.folder)
        echo("\n".join(report.lines()))
        return report

    def plan(self) -> list[StagePlan]:
        """What each stage will take, as far as it is known, without asking anything."""
        progress, rows = self._known(), self._observed()
        options, (train, held_out) = self.options, self.app.sizes()
        wanted = train * options.observe_rollouts
        observe = self._on_teacher("observe", wanted - len(rows), rows)
        good = self.folder / GOOD
        sft = StagePlan("sft", progress.sft is not None, work=self._sft_work(good))
        rounds = options.rounds - len(progress.rounds)
        most = rounds * (options.round_steps * self.app.rollouts_per_step() + held_out) + held_out * (
            not progress.rounds
        )
        judged = f", {counted(rounds * options.round_steps, 'step')} judged" if self.app.judge is not None else ""
        work = f"{counted(rounds, 'round')} at most of {counted(options.round_steps, 'step')}, {counted(most, 'run')}{judged}"
        ended = bool(progress.ended) or (progress.sft is not None and rounds <= 0)
        return [
            observe,
            sft,
            StagePlan("train", ended, work=f"{work}, on the trained model"),
            self._on_teacher("compare", held_out, rows),
        ]

    def _on_teacher(self, stage: str, runs: int, rows: Sequence[ComparedRollout]) -> StagePlan:
        """A plan of so many runs on the teacher, by what earlier ones took."""
        work = f"{counted(runs, 'run')} of the app on {self.teacher.name}"
        if runs <= 0 and stage == "observe":
            return StagePlan(stage, True)
        if not rows:
            return StagePlan(
                stage, False, cost=None, work=f"{work}; what one takes is known after the first {FIRST_RUNS}"
            )
        calls = [call for row in rows for call in row.calls]
        share = runs / len(rows)
        costs = [call.cost for call in calls]
        cost = None if None in costs else share * sum(cost or 0.0 for cost in costs)
        minutes = share * sum(row.seconds for row in rows) / 60
        return StagePlan(
            stage,
            False,
            round(share * len(calls)),
            round(share * sum(call.prompt_tokens or 0 for call in calls)),
            round(share * sum(call.completion_tokens or 0 for call in calls)),
            cost,
            f"{work}, about {minutes:.1f} min one after the other",
        )

    def _sft_work(self, good: Path) -> str:
        epochs, size = self.options.sft.epochs, self.options.sft.batch_size
        if not good.exists():
            return f"{counted(epochs, 'epoch')} on the good runs, {counted(size, 'conversation')} a batch"
        text = good.read_text(encoding="utf-8")
        number = text.count("\n")
        batches = epochs * -(-number // size)
        return f"{counted(number, 'conversation')} of about {tokens_of(text):,} tokens, {counted(batches, 'update')}"

    async def _observe(self, progress: Progress) -> None:
        options, began = self.options, clock.now()
        plan = self.plan()[0]
        if not plan.done:
            echo(f"next: {plan.line()}")
            shared: dict[str, Any] = {"rollouts": options.observe_rollouts, "success_at": options.success_at}
            shared |= {"output": self.folder / "observed", "run": f"observe-{self.app.model.name}"}
            if not self._observed():
                await self.app.compared("train", [self.teacher], first=FIRST_RUNS, **shared)
                if not (rest := self.plan()[0]).done:
                    echo(f"next: {rest.line()}")
            report = await self.app.compared("train", [self.teacher], **shared)
            progress.seconds["observe"] = progress.seconds.get("observe", 0.0) + clock.end_of(began) - began
            echo(f"observe: {_told(report, report.candidates[0])}")
        good = self.folder / GOOD
        if not good.exists():
            observed = self._observed()
            chosen = good_runs(await with_rewards(observed, self.app.judge), options.success_at)
            number, left_out = write_conversations(chosen.rows, good), len(observed) - chosen.scored
            progress.good = f"{len(chosen.rows):,} of {counted(chosen.scored, 'run')} are good ({chosen.rule}): {counted(number, 'conversation')}"
            progress.good += (
                f"; {left_out:,} more got no score (delete {good.name} to have them judged again)" if left_out else ""
            )
            echo(f"observe: {progress.good} in {good}")
        self._keep(progress)

    async def _sft(self, progress: Progress) -> None:
        good, began = self.folder / GOOD, clock.now()
        if progress.sft is None:
            echo(f"next: {self.plan()[1].line()}")
            # The request ids of an untouched file are the same after a kill, so that no batch is applied twice.
            prefix = f"sft-{hashlib.sha256(good.read_bytes() + self.app.model.name.encode()).hexdigest()[:20]}"
            result = await self.app.model.train_sft(good, self.options.sft, request_id=prefix)
            progress.sft = result.updates[-1].step if result.updates else result.step
            progress.seconds["sft"] = clock.end_of(began) - began
            self._keep(progress)
            first = result.updates[0].loss if result.updates else float("nan")
            echo(
                f"sft: {counted(len(result.updates), 'update')}, loss {first:.3f} -> {result.loss or first:.3f} nats per token; "
                f"{result.model} is at step {progress.sft}"
            )
        await self._evaluated(progress, SUPERVISED, progress.sft)

    async def _train(self, progress: Progress) -> None:
        """Rounds of reinforcement learning, until held-out success no longer rises."""
        options = self.options
        first = await self._start(progress)
        for number in range(1, options.rounds + 1):
            if number > len(progress.rounds):
                if progress.ended:
                    break
                began = clock.now()
                if number == 1:
                    echo(f"next: {self.plan()[2].line()}")
                step = progress.rounds[-1] if progress.rounds else first
                report = await self.app.trained(step + options.round_steps)
                if report.stopped is Stopped.BUDGET:
                    raise BudgetExceeded("max_cost for other LLMs is spent: raise it to continue")
                progress.rounds.append(report.step)
                if report.stopped in (Stopped.SOLVED, Stopped.NO_SIGNAL, Stopped.NO_CALLS):
                    progress.ended = f"the training had no signal left ({report.stopped})"
                progress.seconds[f"round {number}"] = clock.end_of(began) - began
                self._keep(progress)
            point = await self._evaluated(progress, f"round {number}", progress.rounds[number - 1])
            if not progress.ended and not _above(point, best_of(own_points(progress.curve[:-1], progress.fork))):
                progress.ended = f"held-out {self._measure(progress)} no longer rose in round {number}"
                self._keep(progress)
            if progress.ended and number == len(progress.rounds):
                break
        echo(f"train: {progress.ended or f'all {options.rounds} rounds were run'}")

    async def _start(self, progress: Progress) -> int:
        """The step from which the rounds go on: the supervised one, or the base where that did better held out. Then they
        train a fork, since a model goes on from its newest step."""
        base, supervised = progress.curve
        if not progress.fork and (progress.rounds or not self.options.rounds or supervised.mean >= base.mean):
            return supervised.step
        if not progress.fork:
            progress.fork = f"{self.name}-rounds-{supervised.step}"
            self._keep(progress)
            echo(f"train: the base did better than the supervised step, so {progress.fork} starts from the base")
        self.app = await self.app.forked(progress.fork, 0)
        return 0

    async def _evaluated(self, progress: Progress, stage: str, step: int) -> CurvePoint:
        """Measure a step on the held-out scenarios, beside all before it: a judge's scores hold within one comparison alone. Known
        rollouts are not run again."""
        own = own_points(progress.curve, progress.fork)
        steps = dict.fromkeys([0, *(point.step for point in own), step])
        report = await self.app.compared("held-out", [f"step:{one}" for one in steps], **self._compare_options())
        progress.comparison = report
        if not progress.curve:
            progress.curve.append(CurvePoint("base", 0, report.of("step:0")))
        progress.curve = [
            replace(point, result=report.of(f"step:{point.step}")) if point in own else point
            for point in progress.curve
        ]
        point = CurvePoint(stage, step, report.of(f"step:{step}"))
        progress.curve.append(point)
        echo(f"held out after {stage}: {_told(report, point.result)}")
        return point

    async def _compare(self, progress: Progress) -> None:
        echo(f"next: {self.plan()[3].line()}")
        own = own_points(progress.curve, progress.fork)
        steps = dict.fromkeys(point.step for point in own)
        candidates: list[CandidateLike] = [self.teacher, *(f"step:{step}" for step in steps)]
        report = await self.app.compared("held-out", candidates, **self._compare_options())
        progress.comparison = report
        progress.curve = [
            replace(point, result=replace(report.of(f"step:{point.step}"), difference=point.result.difference))
            if point in own
            else point
            for point in progress.curve
        ]

    def _compare_options(self) -> dict[str, Any]:
        options = self.options
        shared = {"success_at": options.success_at, "gpu_price": options.gpu_price}
        folder = "comparison" if self.app.model.name == self.name else f"comparison-{self.app.model.name}"
        return shared | {"output": self.folder / folder, "run": f"improve-{self.app.model.name}"}

    def _measure(self, progress: Progress) -> str:
        return (progress.comparison.measure if progress.comparison is not None else None) or "success"

    def _observed(self) -> list[ComparedRollout]:
        """The teacher's runs so far, as the journal of the observation has them."""
        file = self.folder / "observed" / ROWS
        return list(Journal(file).rows.values())

    def _known(self) -> Progress:
        """What stages.json says of earlier runs. Raises ConfigError."""
        file = self.folder / STATE
        if not file.exists():
            return Progress()
        try:
            kept: dict[str, Json] = read_json(file)
            if kept.pop("model") != self.name:
                raise ConfigError(f"{file} belongs to another model: choose another output folder")
            return Progress(**kept)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error!r}): delete it, or choose another output folder"
            ) from error

    def _keep(self, progress: Progress) -> None:
        kept = {name: getattr(progress, name) for name in ("sft", "fork", "rounds", "ended", "seconds", "good")}
        write_whole(self.folder / STATE, json.dumps({"model": self.name, **kept}, indent=1) + "\n")

    def _report(self, progress: Progress, ran: StagesRun) -> ImproveReport:
        return ImproveReport(
            folder=self.folder,
            model=self.app.model.name,
            base_model=self.app.model.base_model,
            teacher=self.teacher.name,
            reached=ran.reached,
            stopped=ran.stopped,
            good=progress.good,
            ended=progress.ended,
            seconds=dict(progress.seconds),
            curve=tuple(progress.curve),
            comparison=progress.comparison,
            spending=ran.spending,
            fork=progress.fork,
        )


def _above(point: CurvePoint, best: CurvePoint | None) -> bool:
    return point.result.value is not None and (best is None or point.mean > best.mean)


def _told(report: ComparisonReport, result: CandidateResult) -> str:
    """A candidate's result in one line."""
    parts = [f"{report.measure} {shown_interval(result.value)}"] if result.value is not None else []
    if result.difference is not None:
        parts.append(f"difference to {report.baseline} {shown_interval(result.difference, sign='+')}")
    cost = "price unknown" if result.total_cost is None else f"{result.total_cost:.4f} USD"
    parts += [f"{counted(result.rollouts, 'run')}, {result.calls:.1f} calls each"]
    parts += [] if result.trained else [cost]
    parts += [f"{result.failed} failed"] if result.failed else []
    return f"{result.name}: {', '.join(parts)}"
