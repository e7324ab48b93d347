"""Continuous batching: the thread that owns the model, and the queue in front of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from .adapters import Adapter
from .batch import RunningBatch, Updates
from .generation import Deliver, Failure, Generation, Update
from .model import ModelRunner

_log = logging.getLogger(__name__)

QUANTUM = 8
"""Steps of one batch before the next adapter's batch has its turn."""
_IDLE_KEPT = 2
"""Empty batches that keep their prefixes; each may hold `batch.PREFIX_BYTES`."""
_GATHER_PAUSE = 0.003
_GATHER_LIMIT = 0.025


class Scheduler:
    """Samples submitted calls in a thread of its own, up to `max_batch` at once, in order of arrival.

    A batch holds one adapter; batches take turns. `deliver` gets each call's updates. `submit`, `cancel` and `forget`
    may be called from any thread. When the thread dies, `on_death` is called in it; calls, also later ones, fail.
    """

    def __init__(
        self,
        runner: ModelRunner,
        deliver: Deliver,
        *,
        max_batch: int = 64,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._on_death = on_death
        self._death: Failure | None = None
        self._deliver = deliver
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._queue: deque[Generation] = deque()
        self._cancelled: set[Generation] = set()
        self._forgotten: list[Adapter] = []
        self._closing = False
        self._batches: dict[Adapter | None, RunningBatch] = {}
        self._waiting: dict[Adapter | None, list[Generation]] = {}
        self._turns: deque[Adapter | None] = deque()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue calls to be sampled."""
        with self._changed:
            if self._death is None:
                self._queue.extend(generations)
                self._changed.notify()
                return
        self._fail(generations, self._death)

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Stop sampling calls that nobody waits for; no update of theirs is promised any more."""
        with self._changed:
            self._cancelled.update(generations)
            self._changed.notify()

    def forget(self, adapter: Adapter) -> None:
        """Free what is kept for an adapter once the calls that use it are done."""
        with self._changed:
            self._forgotten.append(adapter)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step it is in; calls in flight get a failure."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """Calls in flight: in a batch, or about to enter one."""
        return sum(map(len, list(self._batches.values()))) + sum(map(len, list(self._waiting.values())))

    @property
    def dead(self) -> bool:
        """Whether the thread has died, so that nothing is sampled any more."""
        return self._death is not None

    def _run(self) -> None:
        try:
            self._sample()
        except BaseException as error:  # noqa: BLE001  # whatever it was, nobody must wait for this thread
            _log.exception("the sampling thread has died")
            self._on_death()
            with self._changed:
                self._death = Failure(f"the engine has died: {type(error).__name__}: {error}")
            self._fail(self._unanswered(), self._death)

    def _sample(self) -> None:
        while self._collect():
            if not self._turns:
                continue
            adapter = self._turns[0]
            self._turn(adapter)
            self._turns.popleft()
            if self._waiting.get(adapter) or len(self._batches[adapter]):
                self._turns.append(adapter)
            else:
                self._rest(adapter)
        self._fail(self._unanswered(), Failure("the engine is stopping"))

    def _unanswered(self) -> list[Generation]:
        left = [*self._queue, *(one for batch in self._batches.values() for one in batch.generations)]
        return left + [one for waiting in self._waiting.values() for one in waiting]

    def _collect(self) -> bool:
        """Take in what other threads asked for; waits when there is nothing to do. False: close."""
        with self._changed:
            if not self._turns:
                while not (self._queue or self._closing or self._cancelled or self._forgotten):
                    self._changed.wait()
                self._gather()
            cancelled, self._cancelled = self._cancelled, set()
            forgotten, self._forgotten = self._forgotten, []
            room = self._max_batch - self.running
            entering: list[Generation] = []
            if cancelled:
                self._queue = deque(one for one in self._queue if one not in cancelled)
            while self._queue and len(entering) < room:
                entering.append(self._queue.popleft())
            closing = self._closing
        for generation in entering:
            self._waiting.setdefault(generation.adapter, []).append(generation)
            if generation.adapter not in self._turns:
                self._turns.append(generation.adapter)
        if cancelled:
            self._drop(cancelled)  # last: should it fail, all calls are where a death finds them
        self._release(forgotten)
        return not closing

    def _gather(self) -> None:
        """Idle, with a first call just in: wait a moment for those that come with it."""
        until = time.monotonic() + _GATHER_LIMIT
        seen = 0
        while seen < len(self._queue) < self._max_batch and time.monotonic() < until and not self._closing:
            seen = len(self._queue)
            self._changed.wait(_GATHER_PAUSE)

    def _drop(self, cancelled: set[Generation]) -> None:
        for adapter, waiting in self._waiting.items():
            self._waiting[adapter] = [one for one in waiting if one not in cancelled]
        for batch in self._batches.values():
            if not cancelled.isdisjoint(batch.generations):
                batch.remove(cancelled)

    def _release(self, forgotten: Sequence[Adapter]) -> None:
        with self._changed:
            queued = {one.adapter for one in self._queue} if forgotten else set[Adapter | None]()
        for adapter in forgotten:
            if adapter in self._turns or adapter in queued:
                self._forgotten.append(adapter)
            else:
                self._batches.pop(adapter, None)
                self._waiting.pop(adapter, None)
                self._runner.wardrobe.forget(adapter)

    def _turn(self, adapter: Adapter | None) -> None:
        """Let the waiting calls of one adapter enter its batch, and decode for a while."""
        entering = self._waiting.pop(adapter, [])
        batch = self._batches.get(adapter)
        try:
            if batch is None:
                batch = self._batches[adapter] = RunningBatch(self._runner)
            self._runner.wardrobe.wear(adapter)
            if entering:
                self._hand(batch.admit(entering))
            for _ in range(QUANTUM if len(self._turns) > 1 else 1):
                if not len(batch):
                    break
                self._hand(batch.step())
        except Exception as error:  # noqa: BLE001  # whatever the pass raised fails these calls, and the engine goes on
            running = list(batch.generations) if batch is not None else []
            failed = [*running, *(one for one in entering if one not in running)]
            _log.exception("sampling failed for %d calls", len(failed))
            self._fail(failed, self._failure(error))
            # A device that refuses this too is the end of the thread.
            self._batches[adapter] = RunningBatch(self._runner)

    def _rest(self, adapter: Adapter | None) -> None:
        """A batch has run empty: keep it for the next turn of its conversations, and free the one idle for longest."""
        self._batches[adapter] = self._batches.pop(adapter)
        idle = [other for other in self._batches if other not in self._turns]
        for other in idle[:-_IDLE_KEPT]:
            del self._batches[other]

    def _hand(self, updates: Updates) -> None:
        if updates:
            self._deliver(updates)

    def _fail(self, generations: Sequence[Generation], failure: Failure) -> None:
        self._hand([(generation, Update(failure=failure)) for generation in generations])

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return Failure(
                f"out of memory with up to {self._max_batch} calls of up to {self._runner.max_model_len} tokens: "
                f"lower --max-batch or --max-model-len ({error})",
                code="out_of_memory",
            )
        return Failure(f"sampling failed: {type(error).__name__}: {error}")
