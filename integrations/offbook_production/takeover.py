"""The takeover of one route: which side answers a thread, what the evidence decides, and the records of both.

Decisions take effect in memory at once, and are stored behind it. A restart repeats a decision on scores that was not stored:
it reads the same scores in the same order. Calls and their failures are counted anew.

The evidence is the interval of the difference of two means, Agresti and Caffo's ("Simple and effective confidence intervals for
proportions and differences of proportions", The American Statistician 54, 2000) for scores in [0, 1] in place of successes: each
side gets one score of 0 and one of 1 more, so that equal scores are no certainty.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import ValidationError

from offbook.base import clock
from offbook.base.types import new_id
from offbook.server.errors import ApiError, shown
from offbook.server.records.notes import kept_note, read_note, save_notes
from offbook.server.records.store import Store

from .takeover_threads import TakenThread, ThreadScore, add_threads, begin_takeover, read_threads, score_threads
from .threads import position, trajectory_id
from .wire import Decision, Numbers, Status, TakeoverRule, TakeoverState, Verdict

logger = logging.getLogger(__name__)

TAKEOVER_NOTE = "takeover:"
"""Before a route's name, the key of the note of its takeover."""
KNOWN_THREADS = 200_000
"""Threads whose side is kept in memory: the newest."""
SAVE_SECONDS = 1.0
NEWEST_CALLS, MAX_FAILED = 50, 10
"""Of the newest calls of the small model, so many may fail."""
Z = 1.96
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class ScoreSums:
    """The number of scores in [0, 1], their sum, and that of their squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, score: float) -> ScoreSums:
        """With one more score."""
        return ScoreSums(self.count + 1, self.total + score, self.squares + score * score)

    @property
    def mean(self) -> float | None:
        """None without scores."""
        return self.total / self.count if self.count else None


def interval(tested: ScoreSums, reference: ScoreSums) -> tuple[float, float]:
    """The 95 % interval of the difference of the means, tested - reference.

    >>> low, high = interval(ScoreSums(100, 92, 92), ScoreSums(900, 828, 828))
    >>> round(low, 3), round(high, 3)
    (-0.065, 0.051)
    """
    means, error = list[float](), 0.0
    for scores in (tested, reference):
        number = scores.count + 2
        mean = (scores.total + 1) / number
        means.append(mean)
        error += max(0.0, (scores.squares + 1) / number - mean * mean) / number
    room = Z * math.sqrt(error)
    return means[0] - means[1] - room, means[0] - means[1] + room


@dataclass
class Evidence:
    """The scores of a takeover. First the small and the paid model's count until each has `threads`; then all threads are the small
    model's, whose scores count by `threads` at a time, against the same scores of the paid model."""

    threads: int
    small: ScoreSums = field(default_factory=ScoreSums)
    paid: ScoreSums = field(default_factory=ScoreSums)
    watched: ScoreSums = field(default_factory=ScoreSums)

    @property
    def complete(self) -> bool:
        """Whether each side has enough scores."""
        return min(self.small.count, self.paid.count) >= self.threads

    def add(self, score: float, *, small: bool, watched: bool) -> None:
        """Take in the first score of a thread, in [0, 1]. `watched`: the thread began after the small model took over."""
        if watched and small:
            begun = self.watched if self.watched.count < self.threads else ScoreSums()
            self.watched = begun.plus(score)
        elif not watched and not self.complete:
            self.small, self.paid = (
                (self.small.plus(score), self.paid) if small else (self.small, self.paid.plus(score))
            )


class Takeover:
    """A route's takeover. Needs a running event loop; `open` before use, `close` ends it."""

    def __init__(self, route: str, store: Store) -> None:
        self.state = TakeoverState(route=route)
        self._store = store
        self._key = TAKEOVER_NOTE + route
        self._sides: dict[str, bool] = {}
        self._new: list[TakenThread] = []
        self._saved = ""
        self._saving: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        """Forget threads, evidence and counts."""
        self._sides, self._new = {}, []
        self._evidence = Evidence(self.state.rule.threads)
        self._calls = 0
        self._refused = False  # a score beyond the rule's, which the log has named
        self._failed = Counter[str]()
        self._newest = deque[bool](maxlen=NEWEST_CALLS)

    async def open(self) -> None:
        """Go on from the records. Those that do not read back leave all calls with the paid model. Raises StoreError."""
        text = await self._store.read(lambda connection: read_note(connection, self._key))
        if text is not None and (stored := stored_takeover(text)) is not None:
            self.state, self._saved = stored, text
        elif text is not None:
            await self._store.write(save_notes, kept_note(self._key, text))
            logger.error("takeover of %s: its stored state does not read back: it has ended", self.state.route)
        self._begin()
        if self.state.active:
            rows = await self._store.read(lambda connection: read_threads(connection, self.state.id))
            try:
                self._replay(rows)
            except Exception as error:  # noqa: BLE001  # records of any shape
                self._leave("left", f"its stored threads do not read back: {shown(error)}")
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
        """Whether calls may go to the small model."""
        return self.state.active

    def asks_small(self, thread: str | None) -> bool:
        """Whether the small model answers a call of this thread. A thread stays on the side on which its first call was.

        Calls without a thread's name stay with the paid model until all threads are with the small one.
        """
        state = self.state
        if not state.active or thread is None:
            return state.status == "taken_over"
        name = trajectory_id(state.route, thread)
        if (small := self._sides.get(name)) is None:
            small = position("takeover", state.route, thread) < state.share
            self._remember(name, small)
            self._new.append(TakenThread(name, state.id, int(state.status == "taken_over"), small, clock.now()))
        return small

    async def score(self, trajectory: str, name: str, score: float, answered_by: str | None = None) -> bool | None:
        """Take in feedback named `name`: whether it is the thread's first score; None for what is no evidence: of a thread that
        is not part of this, or on a call that the other side answered. `answered_by`: the model of the call that it is on; None:
        on the whole thread.

        Raises ApiError 400 for a score that is not between the rule's lowest and highest, StoreError.
        """
        state, rule = self.state, self.state.rule
        if not state.active or name != rule.score:
            return None
        if not rule.lowest <= score <= rule.highest:
            if trajectory not in self._sides:
                return None
            message = (
                f"score {score:g} is not between the takeover's lowest ({rule.lowest:g}) and highest ({rule.highest:g}), and no "
                "evidence: start it with the scores that your app gives"
            )
            if not self._refused:
                logger.warning("takeover of %s: %s", state.route, message)
            self._refused = True
            raise ApiError(400, message, "score", "score_out_of_range")
        await self._save_threads()
        small = None if answered_by is None else answered_by == state.model
        scored = await self._store.write(score_threads, ThreadScore(trajectory, state.id, score, clock.now(), small))
        if scored is None:
            return None
        if scored.first and state.id == self.state.id and self.state.active:
            self._add(score, scored.small, scored.stage)
        return scored.first

    def add_call(self, failure: str | None) -> None:
        """Take in a call for which the small model was asked, and leave if too many of the newest failed."""
        self._calls += 1
        self._newest.append(failure is not None)
        if failure is not None:
            self._failed[failure] += 1
            if self.state.active and sum(self._newest) > MAX_FAILED:
                self._leave("left", f"more than {MAX_FAILED} of {len(self._newest)} calls failed")

    async def start(self, rule: TakeoverRule, model: str) -> TakeoverState:
        """Begin a takeover by `model`, a name with a step. Raises ApiError 409 while one is under way, StoreError."""
        if self.state.active:
            raise ApiError(409, f"a takeover by {self.state.model} is under way: stop it first", code="takeover_active")
        state = self.state
        await self._store.write(begin_takeover, state.id)
        fields = {"status": "running", "id": new_id("takeover"), "model": model, "rule": rule, "numbers": Numbers()}
        self.state = state.model_copy(update=fields)
        self._begin()
        self._record(
            "started", f"{rule.share:.3g} of threads, {rule.threads} scores of each side, margin {rule.margin:g}"
        )
        await self.save()
        return self.state

    async def stop(self) -> TakeoverState:
        """Give all calls to the paid model. Raises ApiError 409 if they are there, StoreError."""
        if not self.state.active:
            raise ApiError(409, f"no takeover is under way: it is {self.state.status!r}", code="no_takeover")
        self._leave("stopped", "by a person")
        await self.save()
        return self.state

    def current(self) -> TakeoverState:
        """The state, with the numbers of now."""
        return self.state if not self.state.active else self.state.model_copy(update={"numbers": self._numbers()})

    def _add(self, score: float, small: bool, stage: int) -> None:
        """Take in the first score of a thread, and let the evidence decide. Takes effect at once."""
        evidence, margin = self._evidence, self.state.rule.margin
        evidence.add(self.state.rule.scaled(score), small=small, watched=bool(stage))
        numbers = self._numbers()
        if self.state.status == "running" and evidence.complete and numbers.lower is not None:
            if numbers.lower > -margin:
                self._record("taken_over", f"worse by less than {margin:g}, if at all", "taken_over")
            else:
                self._leave("left", f"not shown to be worse by less than {margin:g}")
        elif evidence.watched.count == evidence.threads and numbers.upper is not None and numbers.upper < -margin:
            self._leave("left", f"worse by more than {margin:g} since it took over")

    def _numbers(self) -> Numbers:
        rule, evidence = self.state.rule, self._evidence
        width = rule.highest - rule.lowest
        small = evidence.watched if evidence.watched.count else evidence.small
        bounds = interval(small, evidence.paid) if small.count and evidence.paid.count else None
        means = [None if mean is None else rule.lowest + width * mean for mean in (small.mean, evidence.paid.mean)]
        return Numbers(
            small=small.count,
            paid=evidence.paid.count,
            small_score=means[0],
            paid_score=means[1],
            lower=None if bounds is None else width * bounds[0],
            upper=None if bounds is None else width * bounds[1],
            calls=self._calls,
            failed=dict(self._failed),
        )

    def _leave(self, verdict: Verdict, reason: str) -> None:
        self._record(verdict, reason, "stopped" if verdict == "stopped" else "left")
        logger.warning("takeover of %s by %s: %s: %s", self.state.route, self.state.model, verdict, reason)
        self._sides = {}

    def _record(self, verdict: Verdict, reason: str, status: Status = "running") -> None:
        state, numbers = self.state, self._numbers()
        decision = Decision(decided_at=clock.now(), verdict=verdict, reason=reason, model=state.model, numbers=numbers)
        self.state = state.model_copy(
            update={"decisions": (*state.decisions, decision), "status": status, "numbers": numbers}
        )
        self._decided.set()

    def _replay(self, rows: list[tuple[TakenThread, float | None]]) -> None:
        """Take in the stored threads, and their scores as they came."""
        for taken, _ in rows[-KNOWN_THREADS:]:
            self._remember(taken.id, taken.small)
        for taken, score in rows:
            if score is not None and self.state.active:
                self._add(score, taken.small, taken.stage)

    def _remember(self, name: str, small: bool) -> None:
        self._sides[name] = small
        while len(self._sides) > KNOWN_THREADS:
            del self._sides[next(iter(self._sides))]

    async def save(self) -> None:
        """Store new threads and the state. Raises StoreError."""
        await self._save_threads()
        text = self.state.model_dump_json()
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


def stored_takeover(text: str) -> TakeoverState | None:
    """The state of a stored text; None for one that does not read back."""
    try:
        return TakeoverState.model_validate_json(text)
    except ValidationError:
        return None
