"""`Improver`: from a source of scenarios to a trained model, stage by stage. A description, an app and a server differ in where
the scenarios come from; what happens then is here. `Improver.arun` has the order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbook.base.errors import BudgetExceeded, ConfigError
from offbook.base.json_files import read_json
from offbook.base.sync_calls import run_sync
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.llms.ledger import budget
from offbook.trainer.report import Stopped, TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import ROWS
from offbook_compare.journal import ComparedRollout, Journal
from offbook_compare.report import candidate_line
from offbook_compare.results import ComparisonReport

from .good_runs import good_runs, with_rewards, write_conversations
from .options import ImproveOptions
from .report import CurvePoint, ImproveReport, best_of, write_report
from .sources import TrainingSource
from .task import write_whole

GOOD = "good.jsonl"
STATE = "stages.json"
SPENT = "spending.jsonl"
"""The ledger in the folder: what all runs with it have spent."""


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

        A spent `max_cost`, over all runs with the folder, ends the run well. Raises ConfigError, LlmError for an LLM whose
        answers are invalid, and the errors of `compare`, `train_sft` and `Trainer`."""
        report = self._known()
        stages = list(self.source.input_stages())
        if self.teacher is not None:
            stages += [("observe", lambda: self._observe(report)), ("sft", lambda: self._sft(report))]
        stages += [("train", lambda: self._train(report)), ("compare", lambda: self._compare(report))]
        names = [name for name, _ in stages]
        if until not in names:
            raise ConfigError(f"until: one of {', '.join(names)} is needed, got {until!r}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with budget(self.options.max_cost, file=self.folder / SPENT) as spending:
            try:
                for name, run in stages[: names.index(until) + 1]:
                    await run()
                    report.reached = name
            except BudgetExceeded as error:
                report.stopped = "budget"
                echo(f"{error}. What was made stays in {self.folder}: run it again with more, and it goes on")
            report.spending = spending.by_purpose()
        report.texts = self.source.texts()
        write_report(report)
        echo("\n".join(report.lines()))
        return report

    async def _observe(self, report: ImproveReport) -> None:
        assert self.teacher is not None
        options = self.options
        if len(self._observed()) < len(self.source.scenarios("train")) * options.observe_rollouts:
            shared: dict[str, Any] = {"rollouts": options.observe_rollouts, "success_at": options.success_at}
            shared |= {"output": self.folder / "observed", "run": f"observe-{self.name}"}
            observed = await self.source.compared("train", [self.teacher], **shared)
            echo(f"observe: {candidate_line(observed, observed.candidates[0])}")
        good = self.folder / GOOD
        if not good.exists():
            observed = self._observed()
            chosen = good_runs(await with_rewards(observed, self.source.judge), options.success_at)
            number, left_out = write_conversations(chosen.rows, good), len(observed) - chosen.scored
            report.good = f"{len(chosen.rows):,} of {counted(chosen.scored, 'run')} are good ({chosen.rule}): {counted(number, 'conversation')}"
            report.good += (
                f"; {left_out:,} more got no score (delete {good.name} to have them judged again)" if left_out else ""
            )
            echo(f"observe: {report.good} in {good}")
        self._keep(report)

    async def _sft(self, report: ImproveReport) -> None:
        good = self.folder / GOOD
        if report.sft is None:
            # The request ids of an untouched file are the same after a kill, so that no batch is applied twice.
            prefix = f"sft-{hashlib.sha256(good.read_bytes() + self.name.encode()).hexdigest()[:20]}"
            result = await self.source.model.train_sft(good, self.options.sft, request_id=prefix)
            report.sft = result.updates[-1].step if result.updates else result.step
            self._keep(report)
            first = result.updates[0].loss if result.updates else float("nan")
            echo(
                f"sft: {counted(len(result.updates), 'update')}, loss {first:.3f} -> {result.loss or first:.3f} nats per token; "
                f"{result.model} is at step {report.sft}"
            )
        await self._evaluated(report, "supervised", report.sft)

    async def _train(self, report: ImproveReport) -> None:
        """Rounds of reinforcement learning, until held-out success no longer rises; without a teacher one, which nothing measures."""
        options = self.options
        if self.teacher is None:
            report.training = await self._trained(options.round_steps)
            return
        first = report.sft or 0
        for number in range(1, options.rounds + 1):
            if number > len(report.rounds):
                if report.ended:
                    break
                trained = await self._trained((report.rounds[-1] if report.rounds else first) + options.round_steps)
                report.rounds.append(trained.step)
                if trained.stopped in (Stopped.SOLVED, Stopped.NO_SIGNAL, Stopped.NO_CALLS):
                    report.ended = f"the training had no signal left ({trained.stopped})"
                self._keep(report)
            point = await self._evaluated(report, f"round {number}", report.rounds[number - 1])
            best = best_of(report.curve[:-1])
            if not report.ended and (point.result.value is None or (best is not None and point.mean <= best.mean)):
                report.ended = f"held-out {report.measure} no longer rose in round {number}"
                self._keep(report)
            if report.ended and number == len(report.rounds):
                break
        echo(f"train: {report.ended or f'all {options.rounds} rounds were run'}")

    async def _trained(self, steps: int) -> TrainReport:
        report = await self.source.trained(steps)
        if report.stopped is Stopped.BUDGET:
            raise BudgetExceeded("max_cost for other LLMs is spent: raise it to continue")
        return report

    async def _evaluated(self, report: ImproveReport, stage: str, step: int) -> CurvePoint:
        """Measure a step on the held-out scenarios, beside all before it: a judge's scores hold within one comparison alone. Known
        rollouts are not run again."""
        steps = dict.fromkeys([0, *(point.step for point in report.curve), step])
        measured = await self._held_out(report, [f"step:{one}" for one in steps])
        if not report.curve:
            report.curve.append(CurvePoint("base", 0, measured.of("step:0")))
        report.curve = [replace(point, result=measured.of(f"step:{point.step}")) for point in report.curve]
        point = CurvePoint(stage, step, measured.of(f"step:{step}"))
        report.curve.append(point)
        echo(f"held out after {stage}: {candidate_line(measured, point.result)}")
        return point

    async def _compare(self, report: ImproveReport) -> None:
        if self.teacher is None:
            step, held_out = await self.source.model.get_step(), len(self.source.scenarios("held-out"))
            if held_out < 2 or not step:
                echo(f"no comparison: {counted(held_out, 'held-out scenario')}, and the model is at step {step}")
            else:
                await self._evaluated(report, "training", step)
            return
        steps = dict.fromkeys(point.step for point in report.curve)
        compared = await self._held_out(report, [self.teacher, *(f"step:{step}" for step in steps)])
        report.curve = [
            replace(point, result=replace(compared.of(f"step:{point.step}"), difference=point.result.difference))
            for point in report.curve
        ]

    async def _held_out(self, report: ImproveReport, candidates: Sequence[CandidateLike]) -> ComparisonReport:
        """Compare candidates on the held-out scenarios."""
        options = self.options
        report.comparison = await self.source.compared(
            "held-out",
            candidates,
            success_at=options.success_at,
            gpu_price=options.gpu_price,
            output=self.folder / "comparison",
            run=f"improve-{self.name}",
        )
        return report.comparison

    def _observed(self) -> list[ComparedRollout]:
        """The teacher's runs so far, as the journal of the observation has them."""
        return list(Journal(self.folder / "observed" / ROWS).rows.values())

    def _known(self) -> ImproveReport:
        """What stages.json says of earlier runs. Raises ConfigError."""
        file, teacher = self.folder / STATE, "" if self.teacher is None else self.teacher.name
        named: dict[str, Any] = {"folder": self.folder, "model": self.name, "teacher": teacher}
        if not file.exists():
            return ImproveReport(**named)
        try:
            kept: dict[str, Json] = read_json(file)
            if kept.pop("model") != self.name:
                raise ConfigError(f"{file} belongs to another model: choose another output folder")
            return ImproveReport(**named, **kept)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error!r}): delete it, or choose another output folder"
            ) from error

    def _keep(self, report: ImproveReport) -> None:
        kept = {name: getattr(report, name) for name in ("sft", "rounds", "ended", "good")}
        write_whole(self.folder / STATE, json.dumps({"model": self.name, **kept}, indent=1) + "\n")
