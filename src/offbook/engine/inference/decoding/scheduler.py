"""Continuous batching: a thread that samples from the model, and its queue of generations."""

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

logger = logging.getLogger(__name__)

QUANTUM = 8
"""Steps of one batch before the batch of the next adapter runs."""
_MAX_IDLE = 2
"""Most empty batches that keep their prefixes, of up to `batch.PREFIX_BYTES` each."""
_GATHER_PAUSE = 0.003  # seconds without a new generation that end the gathering
_GATHER_LIMIT = 0.025  # seconds


class Scheduler:
    """Samples submitted generations in its own thread, up to `max_batch` at once, in order of arrival.

    There is one batch per adapter; batches run in turn. `deliver` receives all updates. `submit`, `cancel` and `forget` are
    thread-safe. If the thread dies, it calls `on_death`, and all generations fail, including later ones.
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
        self._active: deque[Adapter | None] = deque()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations."""
        with self._changed:
            if self._death is None:
                self._queue.extend(generations)
                self._changed.notify()
                return
        self._fail(generations, self._death)

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Cancel generations. They may receive no further update."""
        with self._changed:
            self._cancelled.update(generations)
            self._changed.notify()

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an adapter after the generations that use it have ended."""
        with self._changed:
            self._forgotten.append(adapter)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its current step. Unfinished generations fail. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def running(self) -> int:
        """Number of generations in a batch, or about to enter one."""
        return sum(map(len, list(self._batches.values()))) + sum(map(len, list(self._waiting.values())))

    @property
    def dead(self) -> bool:
        """Whether the thread has died. Then every generation fails."""
        return self._death is not None

    def _run(self) -> None:
        try:
            self._sample()
        except BaseException as error:  # callers must not wait for a dead thread
            logger.exception("the sampling thread has died")
            self._on_death()
            with self._changed:
                self._death = Failure(f"the engine has died: {type(error).__name__}: {error}")
            self._fail(self._unanswered(), self._death)

    def _sample(self) -> None:
        while self._collect():
            if not self._active:
                continue
            adapter = self._active[0]
            self._run_batch(adapter)
            self._active.popleft()
            if self._waiting.get(adapter) or len(self._batches[adapter]):
                self._active.append(adapter)
            else:
                self._keep_idle(adapter)
        self._fail(self._unanswered(), Failure("the engine is stopping"))

    def _unanswered(self) -> list[Generation]:
        unanswered = [
            *self._queue,
            *(generation for batch in self._batches.values() for generation in batch.generations),
        ]
        return unanswered + [generation for waiting in self._waiting.values() for generation in waiting]

    def _collect(self) -> bool:
        """Apply the requests of other threads. Waits if there is nothing to do. False after `close`."""
        with self._changed:
            if not self._active:
                while not (self._queue or self._closing or self._cancelled or self._forgotten):
                    self._changed.wait()
                self._gather()
            cancelled, self._cancelled = self._cancelled, set()
            forgotten, self._forgotten = self._forgotten, []
            free = self._max_batch - self.running
            entering: list[Generation] = []
            if cancelled:
                self._queue = deque(generation for generation in self._queue if generation not in cancelled)
            while self._queue and len(entering) < free:
                entering.append(self._queue.popleft())
            closing = self._closing
        for generation in entering:
            self._waiting.setdefault(generation.adapter, []).append(generation)
            if generation.adapter not in self._active:
                self._active.append(generation.adapter)
        if cancelled:
            self._drop(cancelled)  # last, so that `_unanswered` finds every generation if it fails
        self._release(forgotten)
        return not closing

    def _gather(self) -> None:
        """After the first generation in an idle queue, wait briefly for others, so that they start in one batch."""
        until = time.monotonic() + _GATHER_LIMIT
        seen = 0
        while seen < len(self._queue) < self._max_batch and time.monotonic() < until and not self._closing:
            seen = len(self._queue)
            self._changed.wait(_GATHER_PAUSE)

    def _drop(self, cancelled: set[Generation]) -> None:
        for adapter, waiting in self._waiting.items():
            self._waiting[adapter] = [generation for generation in waiting if generation not in cancelled]
        for batch in self._batches.values():
            if not cancelled.isdisjoint(batch.generations):
                batch.remove(cancelled)

    def _release(self, forgotten: Sequence[Adapter]) -> None:
        with self._changed:
            queued = {generation.adapter for generation in self._queue} if forgotten else set[Adapter | None]()
        for adapter in forgotten:
            if adapter in self._active or adapter in queued:
                self._forgotten.append(adapter)
            else:
                self._batches.pop(adapter, None)
                self._waiting.pop(adapter, None)
                self._runner.adapter_layers.forget(adapter)

    def _run_batch(self, adapter: Adapter | None) -> None:
        new = self._waiting.pop(adapter, [])
        batch = self._batches.get(adapter)
        try:
            if batch is None:
                batch = self._batches[adapter] = RunningBatch(self._runner)
            self._runner.adapter_layers.activate(adapter)
            if new:
                self._send(batch.admit(new))
            for _ in range(QUANTUM if len(self._active) > 1 else 1):
                if not len(batch):
                    break
                self._send(batch.step())
        except Exception as error:  # only the generations of this batch fail
            running = list(batch.generations) if batch is not None else []
            affected = [*running, *(generation for generation in new if generation not in running)]
            logger.exception("sampling failed for %d generations", len(affected))
            self._fail(affected, self._failure(error))
            # If this fails as well, the device is unusable and the thread dies.
            self._batches[adapter] = RunningBatch(self._runner)

    def _keep_idle(self, adapter: Adapter | None) -> None:
        """Keep an empty batch for its cached prefixes, and free the batches that have been empty for longest."""
        self._batches[adapter] = self._batches.pop(adapter)
        idle = [other for other in self._batches if other not in self._active]
        for other in idle[:-_MAX_IDLE]:
            del self._batches[other]

    def _send(self, updates: Updates) -> None:
        if updates:
            self._deliver(updates)

    def _fail(self, generations: Sequence[Generation], failure: Failure) -> None:
        self._send([(generation, Update(failure=failure)) for generation in generations])

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            return Failure(
                f"out of memory with up to {self._max_batch} calls of up to {self._runner.max_model_len} tokens: "
                f"lower --max-batch or --max-model-len ({error})",
                code="out_of_memory",
            )
        return Failure(f"sampling failed: {type(error).__name__}: {error}")
