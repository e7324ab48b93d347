"""`Learning`: a model goes on learning from the newest traffic of an app, and is replaced by what it learned only if that did
better on traffic that never trains."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter

from offbook.base import clock
from offbook.base.config import SFTConfig
from offbook.base.errors import ConfigError, ServerError
from offbook.base.locked_folders import held_folder
from offbook.base.options import Headline, RunOptions, option
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Json, Message
from offbook.base.wire import (
    AdoptRequest,
    RolloutTrace,
    TrajectoryQuery,
    TrajectoryRecord,
    name_at,
)
from offbook.client.connection.http import Api
from offbook.client.connection.progress import Bar
from offbook.client.model import TrainableModel
from offbook.client.supervised_training import SupervisedTraining, TrainingExample, TrainingExamples
from offbook.tracing.rollout_reader import pages
from offbook.trainer.evaluate import Interval
from offbook_compare.comparison import acompare
from offbook_compare.report import shown_interval
from offbook_compare.targets import ComparableTarget
from offbook_production.wire import MAX_AUDITED, AuditRequest, TrajectoryAudit

from .options import IMITATION
from .task import write_whole

STATE = "learning.json"
MIN_HELD_OUT = 10
"""Held-out threads below which no round begins: their interval would say nothing."""


PAGE = 200


@dataclass(frozen=True)
class Thread:
    """A recorded thread. `question`: the last message of its user in the first call; `answer`: the last text of the last one."""

    id: str
    question: str
    answer: str
    reward: float | None

    def held_out(self, share: float) -> bool:
        """Whether it never trains. That is decided by a hash of its question alone, so it stays so in each run, and for
        each thread that begins with the same question.

        >>> Thread("a", "Where is box 1?", "", None).held_out(1.0)
        True
        """
        words = " ".join(self.question.lower().split())
        place = int.from_bytes(hashlib.sha256(f"held out\0{words}".encode()).digest()[:8])
        return place < share * 2**64

    def scenario(self) -> dict[str, Json]:
        """The scenario that asks the same. Its id is the thread's, so that the audit finds what was made from a thread."""
        return {"id": self.id, "prompt": self.question, "answer": self.answer, "score": self.reward}


@dataclass(frozen=True, kw_only=True)
class LearnOptions(RunOptions):
    """The options of learning from traffic. Raises ConfigError for an invalid value."""

    heading = "Learning"

    route: Headline[str] = option("", "app to learn from, by the --route of its server")
    days: float = option(14.0, "greatest age of a thread, in days", least=0)
    threads: int = option(1000, "use at most this many threads, the newest ones", least=1, most=MAX_AUDITED)
    least: int = option(16, "train only if there are this many new threads", least=1)
    min_reward: Headline[float | None] = option(
        None, "lowest reward of a thread to imitate", shown_default="all threads, also those without a reward"
    )
    held_out: float = option(0.2, "share of the questions to hold out from training", least=0, most=1)
    compared: int = option(100, "compare on at most this many held-out threads, the newest ones", least=MIN_HELD_OUT)
    gain: float = option(0.0, "promote a step if the whole interval of its gain is above this; below 0 allows a loss")
    sft: SFTConfig = option(IMITATION, "options of the imitation of good threads")
    output: Path | None = option(None, "folder for the state of the rounds", shown_default="learn-MODEL-ROUTE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.route:
            raise ConfigError("route: the name of the app's route is needed, such as order-desk")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out: a share between 0 and 1 is needed, got {self.held_out!r}")


@dataclass
class Round:
    """A round of learning. `served`: the step that it began from, and that served; `step`: that of `candidate` after it. `sft`: the
    options that it began with, and goes on with after a kill.
    `difference`: of the candidate's success and the served step's on held-out threads. `decided`: why it was promoted or not."""

    candidate: str
    served: int
    imitated: list[str]
    held_out: list[str]
    sft: dict[str, Json]
    step: int = 0
    difference: Interval | None = None
    promoted: int | None = None  # as this step of the model
    decided: str = ""
    ended_at: float = 0.0


@dataclass
class LearningState:
    """What the state's file has: the rounds that ended, and the one that a kill may have left open."""

    model: str
    rounds: list[Round] = field(default_factory=list[Round])
    open: Round | None = None


_STATE = TypeAdapter(LearningState)


class Learning:
    """Rounds of learning of one model from the traffic of one route."""

    def __init__(self, app: ComparableTarget, model: TrainableModel, options: LearnOptions) -> None:
        self.app = app
        self.model = model
        self.options = options
        self.folder = options.output or Path(f"learn-{model.name}-{options.route}")

    @property
    def run(self) -> str:
        """The run with the route's threads."""
        return f"route/{self.options.route}"

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes out of the folder inside the block. Raises ConfigError with the pid of one that is in it."""
        return held_folder(self.folder, "--output")

    async def once(self) -> Round | None:
        """Train and compare one round, and promote its step if it did better; None if there is too little new traffic. A round
        that a kill left goes on where it was. Raises the errors of training and comparison."""
        state, api = self._known(), await self.model.api()
        imitated = () if state.open is None else state.open.imitated
        if state.open is not None and len(await self._recorded(api, imitated)) < len(imitated):
            echo(f"{state.open.candidate}: threads of its round were deleted, so it is given up")
            self._end(state, "given up: threads were deleted")
        if state.open is None:
            state.open = await self._begin(api, state)
            if state.open is None:
                return None
            self._keep(state)
        current = state.open
        candidate = await fork_of(self.model, current.candidate, current.served)
        current.step = await self._trained(await candidate.api(), current)
        self._keep(state)
        if current.step == current.served:
            self._end(state, "nothing was learned: no update was applied")
        else:
            await self._decide(api, candidate, state)
        echo(f"{self.model.name}: {current.decided}")
        return current

    async def _begin(self, api: Api, state: LearningState) -> Round | None:
        options, name = self.options, self.model.name
        served = (await api.model(name)).step
        since = clock.now() - options.days * 86_400
        threads = await recorded_threads(api, self.run, name, lambda record: record.ended_at >= since, options.threads)
        held_out = [thread.id for thread in threads if thread.held_out(options.held_out)][: options.compared]
        free = [thread for thread in threads if not thread.held_out(options.held_out)]
        new = await self._untrained(api, free, served)
        least = options.min_reward
        imitated = [
            thread.id for thread in new if least is None or (thread.reward is not None and thread.reward >= least)
        ]
        echo(
            f"{self.run}: {counted(len(threads), 'thread')} of the last {options.days:g} days, {len(held_out)} held out, "
            f"{len(imitated)} to imitate"
        )
        if len(imitated) < options.least:
            echo(f"{name}: nothing is trained: --least asks for {counted(options.least, 'new thread')}")
            return None
        if len(held_out) < MIN_HELD_OUT:
            echo(
                f"{name}: nothing is trained: a comparison needs {MIN_HELD_OUT} held-out threads, there are {len(held_out)}"
            )
            return None
        taken = {known.name for known in await api.models()}  # also by rounds of a state that was lost
        names = (f"{name}-learn-{number}" for number in itertools.count(len(state.rounds) + 1))
        candidate = next(one for one in names if one not in taken)
        return Round(candidate, served, imitated, held_out, options.sft.model_dump(mode="json"))

    async def _untrained(self, api: Api, threads: Sequence[Thread], served: int) -> list[Thread]:
        """Those that the served step has not seen, as the server's records have it."""
        if not threads:
            return []
        request = AuditRequest(trajectory_ids=tuple(thread.id for thread in threads))
        audits = await api.ask(list[TrajectoryAudit], "POST", "/api/audit", request)
        seen = {one.id for one in audits if one.seen_since.get(self.model.name, served + 1) <= served}
        return [thread for thread in threads if thread.id not in seen]

    async def _recorded(self, api: Api, ids: Collection[str]) -> dict[str, Thread]:
        """Those of these threads that are still recorded, by id."""
        known = set(ids)
        threads = await recorded_threads(api, self.run, self.model.name, lambda record: record.id in known, len(known))
        return {thread.id: thread for thread in threads}

    async def _trained(self, api: Api, current: Round) -> int:
        """Train the candidate. Requests have the same ids after a kill, so none is applied twice. Returns its step."""
        prefix = f"learn-{current.candidate}"
        records = [  # each stands for a recorded thread, whose text the server has
            TrajectoryRecord(id=name, model=current.candidate, started_at=0, ended_at=0) for name in current.imitated
        ]
        examples = TrainingExamples(tuple(TrainingExample(record, True, record.id) for record in records))
        config = SFTConfig.parse(**current.sft)
        training = SupervisedTraining(api, current.candidate, config, prefix, finished=set(current.imitated))
        with Bar("learn") as bar:
            await training.run(examples, bar)
        return (await api.model(current.candidate)).step

    async def _decide(self, api: Api, candidate: TrainableModel, state: LearningState) -> None:
        """Compare the candidate with the served step on held-out threads, and promote it if it did better."""
        current = state.open
        assert current is not None
        threads = await self._recorded(api, current.held_out)
        if len(threads) < MIN_HELD_OUT:
            self._end(state, f"not promoted: {len(threads)} held-out threads are left, too few to compare")
            return
        learned = f"step:{current.step}"
        comparison = self.folder / "comparison"
        report = await acompare(
            self.app,
            [threads[name].scenario() for name in current.held_out if name in threads],
            [f"step:{current.served}", learned],
            model=candidate,
            output=comparison,
            run=f"learn-{current.candidate}",
        )
        current.difference = report.of(learned).difference
        told = f"{report.measure or 'score'} {shown_interval(current.difference, sign='+')} on {counted(len(threads), 'held-out thread')}"
        serving, new = name_at(self.model.name, current.served), name_at(current.candidate, current.step)
        if current.difference is None or current.difference.low <= self.options.gain:
            self._end(state, f"not promoted: {new} against {serving}: {told}, which is not above {self.options.gain:g}")
        else:
            request = AdoptRequest(model=current.candidate, step=current.step, after=current.served)
            try:
                current.promoted = (await api.adopt(self.model.name, request)).step
            except ServerError as error:
                if error.code != "model_conflict":
                    raise
                self._end(state, f"not promoted: {error}")
            else:
                serves = name_at(self.model.name, current.promoted)
                self._end(state, f"promoted: {new} serves as {serves}; against {serving}: {told}")
        shutil.rmtree(comparison, ignore_errors=True)  # it has texts of users

    def _end(self, state: LearningState, decided: str) -> None:
        assert state.open is not None
        state.open.decided, state.open.ended_at = decided, clock.now()
        state.rounds.append(state.open)
        state.open = None
        self._keep(state)

    def _known(self) -> LearningState:
        """What the state's file says. Raises ConfigError."""
        file = self.folder / STATE
        if not file.exists():
            return LearningState(self.model.name)
        try:
            state = _STATE.validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read ({error!r}): move it away, or choose another --output") from error
        if state.model != self.model.name:
            raise ConfigError(f"{file} belongs to the model {state.model!r}: choose another --output")
        return state

    def _keep(self, state: LearningState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / STATE, _STATE.dump_json(state, indent=1).decode() + "\n")


async def fork_of(model: TrainableModel, name: str, step: int) -> TrainableModel:
    """The model `name`: made from that step of `model`, unless it is there. Raises ServerError."""
    try:
        state = await (await model.api()).model(name)
    except ServerError as error:
        if error.status != 404:
            raise
        return await model.fork(name, from_step=step)
    return TrainableModel(name, state.project, model.base_model, model.backend, state.lora)


async def recorded_threads(
    api: Api, run: str, model: str, wanted: Callable[[TrajectoryRecord], bool], most: int
) -> list[Thread]:
    """The threads of a run whose records are wanted, at most so many, the last begun first, without failed ones, those of the
    model itself, and those that ask nothing in words."""
    threads: list[Thread] = []
    async for rollout in pages(api, TrajectoryQuery(run=run, failed=False, limit=PAGE)):
        thread = _thread(rollout, model) if wanted(rollout.record) else None
        if thread is not None:
            threads.append(thread)
            if len(threads) == most:
                break
    return threads


def _thread(rollout: RolloutTrace, model: str) -> Thread | None:
    calls = [call for call in rollout.calls if call.outputs and call.status.usable and not call.late]
    if not calls:
        return None
    questions = [text for message in calls[0].messages if message.get("role") == "user" and (text := _text(message))]
    if not questions:
        return None
    outside = {call.id for call in rollout.record.outside_calls}
    if any(call.model == model and call.id not in outside for call in calls):
        return None  # the model's own answers, with tokens
    return Thread(rollout.record.id, questions[-1], _text(calls[-1].outputs[0].message), rollout.record.reward)


def _text(message: Message) -> str:
    content: Json = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [cast(dict[str, Json], part).get("text") for part in cast(list[Json], content) if isinstance(part, dict)]
    return " ".join(part for part in parts if isinstance(part, str))
