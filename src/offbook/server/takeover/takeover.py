"""The takeover of one route: which side answers a thread, what the evidence decides, and the records of both.

Decisions take effect in memory at once, and are stored behind it. A restart repeats a decision on scores that was not stored:
it reads the same scores in the same order. What the guards counted in a stage begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from offbook.base import clock
from offbook.base.takeovers import SHADOW, Decision, Numbers, Status, TakeoverPlan, TakeoverState, Verdict
from offbook.base.types import new_id

from ..errors import ApiError, shown
from ..records.notes import TAKEOVER_NOTE, kept_note, read_note, save_notes
from ..records.store import Store
from ..records.takeover_threads import (
    TakenThread,
    ThreadScore,
    add_threads,
    begin_takeover,
    read_threads,
    score_threads,
)
from ..upstream.threads import position, trajectory_id
from .inputs import SeenInputs, stored_takeover
from .stage import Stage, needs_of

logger = logging.getLogger(__name__)

KNOWN_THREADS = 200_000
"""Threads whose side is kept in memory: the newest."""
SAVE_SECONDS = 1.0
ACTIVE: tuple[Status, ...] = ("running", "waiting", "taken_over")


@dataclass(frozen=True)
class ThreadSide:
    """The stage in which a thread began, and whether the small model answers it."""

    stage: int
    small: bool


class Takeover:
    """A route's takeover. Needs a running event loop; `open` before use, `close` ends it."""

    def __init__(self, route: str, store: Store) -> None:
        self.state = TakeoverState(route=route)
        self.seen = SeenInputs()
        self._store = store
        self._key = TAKEOVER_NOTE + route
        self._sides: dict[str, ThreadSide] = {}
        self._new: list[TakenThread] = []
        self._stage = Stage(self.state.plan, SHADOW, 1)
        self._saved = ""
        self._saving: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()

    async def open(self) -> None:
        """Go on from the records. Those that do not read back leave all calls with the paid model. Raises StoreError."""
        text = await self._store.read(lambda connection: read_note(connection, self._key))
        if text is not None and (stored := stored_takeover(text)) is not None:
            (self.state, self.seen), self._saved = stored, text
        elif text is not None:
            await self._store.write(save_notes, kept_note(self._key, text))
            logger.error("takeover of %s: its stored state does not read back: it has ended", self.state.route)
        if self.state.status in ACTIVE:
            await self._store.write(begin_takeover, "")  # its table, which an older database lacks
            rows = await self._store.read(lambda connection: read_threads(connection, self.state.id))
            try:
                self._replay(rows)
            except Exception as error:  # noqa: BLE001  # records of any shape
                self._leave("left", f"guard: its stored threads do not read back: {shown(error)}")
        self._saving = asyncio.create_task(self._save_all())

    async def close(self) -> None:
        """Store what is not stored yet."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        try:
            await self.save()
        except Exception as error:  # noqa: BLE001  # a server ends whatever its records do
            logger.error("takeover of %s: its last decisions are not stored: %s", self.state.route, shown(error))

    @property
    def active(self) -> bool:
        """Whether calls may go to the small model, or in shadow be shown to it."""
        return self.state.status in ACTIVE

    @property
    def shadowing(self) -> bool:
        """Whether the small model answers unseen."""
        return self.state.status in ("running", "waiting") and self._stage.share == SHADOW

    @property
    def stage(self) -> Stage:
        """The evidence of the stage that runs."""
        return self._stage

    def asks_small(self, thread: str | None) -> bool:
        """Whether the small model answers a call of this thread. A thread stays on the side on which its first call was.

        Calls without a thread's name stay with the paid model until all threads are with the small one.
        """
        state = self.state
        if not self.active:
            return False
        if thread is None:
            return self._stage.share == 1.0
        name = trajectory_id(state.route, thread)
        side = self._sides.get(name)
        if side is None:
            side = ThreadSide(state.stage, position("takeover", state.route, thread) < self._stage.share)
            self._remember(name, side)
            self._new.append(TakenThread(name, state.id, side.stage, side.small, clock.now()))
        return side.small

    async def score(self, trajectory: str, name: str, score: float, answered_by: str | None = None) -> bool | None:
        """Take in feedback named `name`: whether it is the thread's first score; None for what is no evidence: of a thread that
        is not part of this, or on a call that the other side answered. `answered_by`: the model of the call that it is on; None:
        on the whole thread.

        Raises ApiError 400 for a score that is not between the plan's lowest and highest, StoreError.
        """
        state = self.state
        if not self.active or name != state.plan.score:
            return None
        if not state.plan.takes(score):
            return self._refuse(trajectory, score)
        await self._save_threads()
        small = None if answered_by is None else answered_by == state.model
        scored = await self._store.write(score_threads, ThreadScore(trajectory, state.id, score, clock.now(), small))
        if scored is None:
            return None
        if scored.first and state.id == self.state.id and scored.stage == self.state.stage:
            self._stage.add_score(score, small=scored.small)
            self.decide()
        return scored.first

    def _refuse(self, trajectory: str, score: float) -> None:
        if trajectory not in self._sides:
            return
        self._stage.out_of_range += 1
        plan = self.state.plan
        message = (
            f"score {score:g} is not between the takeover's lowest ({plan.lowest:g}) and highest ({plan.highest:g}), and no "
            "evidence: start it with the scores that your app gives"
        )
        if self._stage.out_of_range == 1:
            logger.warning("takeover of %s: %s", self.state.route, message)
        raise ApiError(400, message, "score", "score_out_of_range")

    async def start(self, plan: TakeoverPlan, model: str) -> TakeoverState:
        """Begin a takeover by `model`, a name with a step. Raises ApiError 409 while one is under way, StoreError."""
        if self.active:
            raise ApiError(409, f"a takeover by {self.state.model} is under way: stop it first", code="takeover_active")
        state = TakeoverState(
            route=self.state.route,
            status="running",
            id=new_id("takeover"),
            model=model,
            plan=plan,
            needs=needs_of(plan),
        )
        await self._store.write(begin_takeover, self.state.id)
        self._sides, self._new = {}, []
        self.state = state.model_copy(update={"decisions": self.state.decisions})
        if plan.stages[0] == SHADOW:
            self.seen = SeenInputs()
        self._stage = self._stage_of(0)
        self._record("started", f"{model}, alpha {plan.alpha:g}, margin {plan.margin:g}")
        await self.save()
        return self.state

    async def approve(self) -> TakeoverState:
        """Go on to the next stage. Raises ApiError 409 unless one waits for that, StoreError."""
        if self.state.status != "waiting":
            raise ApiError(
                409, f"no stage waits for approval: the takeover is {self.state.status!r}", code="not_waiting"
            )
        self._record("approved", "by a person")
        self._advance()
        await self.save()
        return self.state

    async def stop(self) -> TakeoverState:
        """Give all calls to the paid model. Raises ApiError 409 if they are there, StoreError."""
        if not self.active:
            raise ApiError(409, f"no takeover is under way: it is {self.state.status!r}", code="no_takeover")
        self._leave("stopped", "by a person")
        await self.save()
        return self.state

    def current(self) -> TakeoverState:
        """The state, with the numbers of now."""
        return self.state if not self.active else self.state.model_copy(update={"numbers": self._stage.numbers()})

    def decide(self) -> None:
        """Let the evidence decide. Takes effect at once."""
        state = self.state
        if not self.active or (finding := self._stage.finding()) is None:
            return
        over = self._stage.share == 1.0
        if finding.passed is False or (finding.passed is None and state.status == "running" and not over):
            self._leave("left", finding.reason)
        elif over:
            if finding.passed and state.status != "taken_over":
                self._record("taken_over", finding.reason, status="taken_over")
            if self._stage.comparison.tested.count >= self._stage.most:
                self._record("round", "the evidence begins anew, so that a later fall shows")
                self._stage = self._stage_of(state.stage)
        elif state.status == "running":
            waits = state.plan.approve
            self._record("passed", finding.reason, status="waiting" if waits else "running")
            if not waits:
                self._advance()

    def _advance(self) -> None:
        stage = self.state.stage + 1
        self.state = self.state.model_copy(update={"stage": stage, "status": "running"})
        self._stage = self._stage_of(stage)
        self._record("started", f"the small model answers {self._stage.share:.0%} of new threads")

    def _leave(self, verdict: Verdict, reason: str) -> None:
        self._record(verdict, reason, status="stopped" if verdict == "stopped" else "left")
        logger.warning("takeover of %s by %s: %s: %s", self.state.route, self.state.model, verdict, reason)
        self.state = self.state.model_copy(update={"share": 0.0, "numbers": self._stage.numbers()})
        self._sides = {}

    def _record(self, verdict: Verdict, reason: str, status: Status | None = None) -> None:
        state, share = self.state, self._stage.share
        numbers = Numbers() if verdict == "started" else self._stage.numbers()
        decision = Decision(
            decided_at=clock.now(),
            stage=state.stage,
            share=share,
            verdict=verdict,
            reason=reason,
            numbers=numbers,
            model=state.model,
        )
        self._decided.set()
        decisions = (*state.decisions, decision)
        self.state = state.model_copy(update={"decisions": decisions, "status": status or state.status, "share": share})

    def _stage_of(self, number: int) -> Stage:
        plan = self.state.plan
        share = plan.stages[number]
        reference = self._stage.comparison.reference if share == 1.0 else None
        return Stage(plan, share, self.state.needs[number].most, reference)

    def _replay(self, rows: list[tuple[TakenThread, float | None, float]]) -> None:
        """Take in the stored threads, and their scores as they came: of this stage and those that it leads to, since the last round
        began; of the stage before too, for its reference."""
        for taken, _, _ in rows[-KNOWN_THREADS:]:
            self._remember(taken.id, ThreadSide(taken.stage, taken.small))
        number, decisions = self.state.stage, self.state.decisions
        began = next((each.decided_at for each in reversed(decisions) if each.verdict in ("started", "round")), 0.0)
        if self.state.plan.stages[number] == 1.0:
            self._stage = self._stage_of(number - 1)
            for taken, score, _ in rows:
                if taken.stage == number - 1 and score is not None:
                    self._stage.add_score(score, small=taken.small)
        self._stage = self._stage_of(number)
        for taken, score, scored_at in rows:
            if taken.stage == self.state.stage and score is not None and scored_at >= began:
                self._stage.add_score(score, small=taken.small)
                self.decide()

    def _remember(self, name: str, side: ThreadSide) -> None:
        self._sides[name] = side
        while len(self._sides) > KNOWN_THREADS:
            del self._sides[next(iter(self._sides))]

    async def save(self) -> None:
        """Store new threads and the state. Raises StoreError."""
        await self._save_threads()
        text = f"{self.state.model_dump_json()}\n{self.seen.model_dump_json()}"
        if self.state.id and text != self._saved:
            await self._store.write(save_notes, (self._key, text))
            self._saved = text

    async def _save_threads(self) -> None:
        if not self._new:
            return
        new, self._new = self._new, []
        try:
            await self._store.write(add_threads, new)
        except BaseException:
            self._new = (new + self._new)[-KNOWN_THREADS:]
            raise

    async def _save_all(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._decided.wait(), SAVE_SECONDS)
            self._decided.clear()
            try:
                await self.save()
            except Exception as error:  # noqa: BLE001  # the next second stores it
                logger.error("takeover of %s is not stored: %s", self.state.route, shown(error))
