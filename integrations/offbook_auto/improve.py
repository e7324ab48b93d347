"""`Improver`: from a source of scenarios to a trained model, stage by stage. A description, an app and a server differ in where
the scenarios come from; what happens then is here. `Improver.arun` has the order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from offbook.base.errors import BudgetExceeded, ConfigError
from offbook.base.json_files import read_json
from offbook.base.sync_calls import run_sync
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.client.model import TrainableModel
from offbook.contracts import Judge
from offbook.llms.ledger import SpendingTotals, budget
from offbook.trainer.report import Stopped, TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import ROWS
from offbook_compare.journal import ComparedRollout, Journal
from offbook_compare.report import shown_interval
from offbook_compare.results import CandidateResult, ComparisonReport

from .good_runs import good_runs, with_rewards, write_conversations
from .options import ImproveOptions
from .report import CurvePoint, ImproveReport, best_of, write_report
from .task import write_whole

Split = Literal["train", "held-out"]
GOOD = "good.jsonl"
STATE = "stages.json"
SPENT = "spending.jsonl"
"""The ledger in the folder: what all runs with it have spent."""

Stage = tuple[str, Callable[[], Awaitable[None]]]


class TrainingSource(Protocol):
    """Where scenarios come from, and what runs on them so that any model can answer."""

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        ...

    @property
    def judge(self) -> Judge | None:
        """What scores runs that have no reward; None: each run has one."""
        ...

    def input_stages(self) -> Sequence[Stage]:
        """What makes the scenarios. Empty where they are there."""
        return ()

    def texts(self) -> Mapping[str, str]:
        """Texts for the report, such as the prompt."""
        return {}

    def sizes(self) -> tuple[int, int]:
        """How many scenarios there are, or will be, to train on and held out."""
        ...

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """`offbook_compare.acompare` on the scenarios of a split."""
        ...

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        ...


@dataclass
class Progress:
    """What the stages have made so far, and what stages.json keeps of it: the step after the supervised training, and after
    each round. `ended`: why no further round follows."""

    sft: int | None = None
    rounds: list[int] = field(default_factory=list[int])
    ended: str = ""
    good: str = ""
    curve: list[CurvePoint] = field(default_factory=list[CurvePoint])
    comparison: ComparisonReport | None = None
    training: TrainReport | None = None


class Improver:
    """Trains the model of a source. With a teacher it observes the teacher, imitates the good runs, goes on with reinforcement
    learning while held-out success rises, and compares with the teacher; without one it trains, and compares with the base."""

    def __init__(self, source: TrainingSource, options: ImproveOptions) -> None:
        self.source = source
        self.options = options
        self.name = source.model.name
        self.folder = options.output or Path(f"improve-{self.name}")
        self.teacher = options.teaching()
        if self.teacher is not None and source.judge is not None and options.observe_rollouts < 2:
            self.options = replace(options, observe_rollouts=4)  # a judge compares runs of one scenario

    def run(self, until: str = "compare") -> ImproveReport:
        """The sync form of `arun`. Raises WrongLoopError inside a running event loop."""
        return run_sync(self.arun, until)

    async def arun(self, until: str = "compare") -> ImproveReport:
        """Run all stages up to `until` whose results are not there yet, and write report.md.

        A spent `max_cost` ends the run well. Raises ConfigError, LlmError for an LLM whose answers are invalid, and the errors of
        `compare`, `train_sft` and `Trainer`."""
        progress = self._known()
        stages = list(self.source.input_stages())
        if self.teacher is not None:
            stages += [("observe", lambda: self._observe(progress)), ("sft", lambda: self._sft(progress))]
        stages += [("train", lambda: self._train(progress)), ("compare", lambda: self._compare(progress))]
        names = [name for name, _ in stages]
        if until not in names:
            raise ConfigError(f"until: one of {', '.join(names)} is needed, got {until!r}")
        report = self._report(progress, await run_stages(stages, until, self.folder, self.options.max_cost))
        write_report(report, self.folder)
        echo("\n".join(report.lines()))
        return report

    async def _observe(self, progress: Progress) -> None:
        assert self.teacher is not None
        options = self.options
        if len(self._observed()) < self.source.sizes()[0] * options.observe_rollouts:
            shared: dict[str, Any] = {"rollouts": options.observe_rollouts, "success_at": options.success_at}
            shared |= {"output": self.folder / "observed", "run": f"observe-{self.source.model.name}"}
            report = await self.source.compared("train", [self.teacher], **shared)
            echo(f"observe: {_line(report, report.candidates[0])}")
        good = self.folder / GOOD
        if not good.exists():
            observed = self._observed()
            chosen = good_runs(await with_rewards(observed, self.source.judge), options.success_at)
            number, left_out = write_conversations(chosen.rows, good), len(observed) - chosen.scored
            progress.good = f"{len(chosen.rows):,} of {counted(chosen.scored, 'run')} are good ({chosen.rule}): {counted(number, 'conversation')}"
            progress.good += (
                f"; {left_out:,} more got no score (delete {good.name} to have them judged again)" if left_out else ""
            )
            echo(f"observe: {progress.good} in {good}")
        self._keep(progress)

    async def _sft(self, progress: Progress) -> None:
        good = self.folder / GOOD
        if progress.sft is None:
            # The request ids of an untouched file are the same after a kill, so that no batch is applied twice.
            prefix = f"sft-{hashlib.sha256(good.read_bytes() + self.source.model.name.encode()).hexdigest()[:20]}"
            result = await self.source.model.train_sft(good, self.options.sft, request_id=prefix)
            progress.sft = result.updates[-1].step if result.updates else result.step
            self._keep(progress)
            first = result.updates[0].loss if result.updates else float("nan")
            echo(
                f"sft: {counted(len(result.updates), 'update')}, loss {first:.3f} -> {result.loss or first:.3f} nats per token; "
                f"{result.model} is at step {progress.sft}"
            )
        await self._evaluated(progress, "supervised", progress.sft)

    async def _train(self, progress: Progress) -> None:
        """Rounds of reinforcement learning, until held-out success no longer rises; without a teacher one, which nothing measures."""
        options = self.options
        if self.teacher is None:
            progress.training = await self._trained(options.round_steps)
            return
        first = progress.sft or 0
        for number in range(1, options.rounds + 1):
            if number > len(progress.rounds):
                if progress.ended:
                    break
                report = await self._trained((progress.rounds[-1] if progress.rounds else first) + options.round_steps)
                progress.rounds.append(report.step)
                if report.stopped in (Stopped.SOLVED, Stopped.NO_SIGNAL, Stopped.NO_CALLS):
                    progress.ended = f"the training had no signal left ({report.stopped})"
                self._keep(progress)
            point = await self._evaluated(progress, f"round {number}", progress.rounds[number - 1])
            if not progress.ended and not _above(point, best_of(progress.curve[:-1])):
                measure = (progress.comparison.measure if progress.comparison is not None else None) or "success"
                progress.ended = f"held-out {measure} no longer rose in round {number}"
                self._keep(progress)
            if progress.ended and number == len(progress.rounds):
                break
        echo(f"train: {progress.ended or f'all {options.rounds} rounds were run'}")

    async def _trained(self, steps: int) -> TrainReport:
        report = await self.source.trained(steps)
        if report.stopped is Stopped.BUDGET:
            raise BudgetExceeded("max_cost for other LLMs is spent: raise it to continue")
        return report

    async def _evaluated(self, progress: Progress, stage: str, step: int) -> CurvePoint:
        """Measure a step on the held-out scenarios, beside all before it: a judge's scores hold within one comparison alone. Known
        rollouts are not run again."""
        steps = dict.fromkeys([0, *(point.step for point in progress.curve), step])
        report = await self._held_out(progress, [f"step:{one}" for one in steps])
        if not progress.curve:
            progress.curve.append(CurvePoint("base", 0, report.of("step:0")))
        progress.curve = [replace(point, result=report.of(f"step:{point.step}")) for point in progress.curve]
        point = CurvePoint(stage, step, report.of(f"step:{step}"))
        progress.curve.append(point)
        echo(f"held out after {stage}: {_line(report, point.result)}")
        return point

    async def _compare(self, progress: Progress) -> None:
        if self.teacher is None:
            step, (_, held_out) = await self.source.model.get_step(), self.source.sizes()
            if held_out < 2 or not step:
                echo(f"no comparison: {counted(held_out, 'held-out scenario')}, and the model is at step {step}")
            else:
                await self._evaluated(progress, "training", step)
            return
        steps = dict.fromkeys(point.step for point in progress.curve)
        report = await self._held_out(progress, [self.teacher, *(f"step:{step}" for step in steps)])
        progress.curve = [
            replace(point, result=replace(report.of(f"step:{point.step}"), difference=point.result.difference))
            for point in progress.curve
        ]

    async def _held_out(self, progress: Progress, candidates: Sequence[CandidateLike]) -> ComparisonReport:
        """Compare candidates on the held-out scenarios."""
        options = self.options
        progress.comparison = await self.source.compared(
            "held-out",
            candidates,
            success_at=options.success_at,
            gpu_price=options.gpu_price,
            output=self.folder / "comparison",
            run=f"improve-{self.name}",
        )
        return progress.comparison

    def _observed(self) -> list[ComparedRollout]:
        """The teacher's runs so far, as the journal of the observation has them."""
        return list(Journal(self.folder / "observed" / ROWS).rows.values())

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
        kept = {name: getattr(progress, name) for name in ("sft", "rounds", "ended", "good")}
        write_whole(self.folder / STATE, json.dumps({"model": self.name, **kept}, indent=1) + "\n")

    def _report(self, progress: Progress, ran: StagesRun) -> ImproveReport:
        return ImproveReport(
            folder=self.folder,
            model=self.source.model.name,
            teacher="" if self.teacher is None else self.teacher.name,
            reached=ran.reached,
            stopped=ran.stopped,
            good=progress.good,
            ended=progress.ended,
            curve=tuple(progress.curve),
            comparison=progress.comparison,
            spending=ran.spending,
            training=progress.training,
            texts=dict(self.source.texts()),
        )


@dataclass(frozen=True)
class StagesRun:
    """How far the stages came. `reached`: the last whole stage, "" for none; `stopped`: "budget" where `max_cost` is spent.
    `spending` covers all runs with the folder, by purpose."""

    reached: str = ""
    stopped: str = ""
    spending: Mapping[str, SpendingTotals] = field(default_factory=dict[str, SpendingTotals])


async def run_stages(stages: Sequence[Stage], until: str, folder: Path, max_cost: float | None) -> StagesRun:
    """Run the stages up to `until`. A spent `max_cost`, over all runs with the folder, ends them well; other errors pass."""
    folder.mkdir(parents=True, exist_ok=True)
    reached, stopped = "", ""
    with budget(max_cost, file=folder / SPENT) as spending:
        try:
            for name, run in stages:
                await run()
                reached = name
                if name == until:
                    break
        except BudgetExceeded as error:
            stopped = "budget"
            echo(f"{error}. What was made stays in {folder}: run it again with more, and it goes on")
        return StagesRun(reached, stopped, spending.by_purpose())


def _above(point: CurvePoint, best: CurvePoint | None) -> bool:
    return point.result.value is not None and (best is None or point.mean > best.mean)


def _line(report: ComparisonReport, result: CandidateResult) -> str:
    """A candidate's result in one line."""
    parts = [f"{report.measure} {shown_interval(result.value)}"] if result.value is not None else []
    if result.difference is not None:
        parts.append(f"difference to {report.baseline} {shown_interval(result.difference, sign='+')}")
    cost = "price unknown" if result.total_cost is None else f"{result.total_cost:.4f} USD"
    parts += [f"{counted(result.rollouts, 'run')}, {result.calls:.1f} calls each"]
    parts += [] if result.trained else [cost]
    parts += [f"{result.failed} failed"] if result.failed else []
    return f"{result.name}: {', '.join(parts)}"
