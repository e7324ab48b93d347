"""The learner child: commands to its stdin, events from its stdout, one command at a time."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from pydantic import ValidationError

from ...config import EngineOptions
from ...engine.protocol import (
    EVENTS,
    LEARNER_MODULE,
    Event,
    Failed,
    MergeCommand,
    Merged,
    Ready,
    StopCommand,
    TrainCommand,
    Trained,
)
from ...errors import EngineError
from ..child_process import Child
from ..models.base_model import BaseModelPath

log = logging.getLogger(__name__)

START_SECONDS = 900.0
HEARTBEAT_SECONDS = 5.0
"""A learner that is silent for so long is looked at."""

State = Literal["stopped", "starting", "ready"]


class LearnerClient:
    """One learner: started early in the background, and again by the next command after a death."""

    def __init__(
        self, base: BaseModelPath, options: EngineOptions, log_path: Path, step_timeout: float | None = None
    ) -> None:
        """`step_timeout`: seconds without an event after which a command is given up."""
        self._base = base
        self._options = options
        self._log_path = log_path
        self._step_timeout = step_timeout
        self._child: Child | None = None
        self._one_at_a_time = asyncio.Lock()
        self._early: asyncio.Task[None] | None = None
        self._ended = False
        self._busy = False
        self.state: State = "stopped"
        self.facts: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """The child's process id, while it runs."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    def start(self) -> None:
        """Begin loading in the background, so that the first step does not wait for it."""
        self._early = asyncio.create_task(self._start_early(), name="learner")

    async def started(self) -> None:
        """Wait until what `start` began is over, well or not."""
        if self._early is not None:
            await asyncio.wait({self._early})

    async def run(self, command: TrainCommand | MergeCommand) -> AsyncGenerator[Event]:
        """The command's events; the last is Trained, Merged or Failed. A learner that dies is a Failed."""
        async with self._one_at_a_time:
            try:
                child = await self._running()
                await _send(child, command)
            except EngineError as error:
                yield Failed(request_id=command.request_id, reason="failed", message=str(error))
                return
            self._busy = True
            async for event in self._events(child, command.request_id):
                if isinstance(event, Trained | Merged | Failed):
                    self._busy = False
                yield event

    async def stop(self, deadline: float = 10.0) -> None:
        """End it; a command in progress is not applied."""
        self._ended = True
        if self._early is not None:
            self._early.cancel()
            with suppress(asyncio.CancelledError):
                await self._early
        child = self._child
        if child is None or child.returncode is not None:
            return
        if not self._busy and self.state == "ready":
            with suppress(EngineError):
                await _send(child, StopCommand())
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), deadline)
        await child.stop(2.0)
        self.state = "stopped"

    def kill(self) -> None:
        """End the child at once, without waiting."""
        if self._child is not None:
            self._child.kill()

    # ---- inside

    async def _start_early(self) -> None:
        async with self._one_at_a_time:
            try:
                await self._running()
            except EngineError as error:
                log.error("The learner did not start; the next train request tries again. %s", error)

    async def _running(self) -> Child:
        """The child, started if need be. Raises EngineError with the log's tail."""
        if self._ended:
            raise EngineError("The server is ending")
        if self._child is not None and self._child.returncode is None and self.state == "ready":
            return self._child
        self.state = "starting"
        try:
            child = self._child = await Child.start(self._argv(), self._log_path, pipes=True, env=self._env())
        except OSError as error:
            raise EngineError(f"The learner could not be started: {error}") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                self.facts = (await self._until_ready(child)).facts
        except BaseException as error:
            self.state = "stopped"
            child.kill()
            if isinstance(error, TimeoutError):
                raise EngineError(f"The learner was not ready within {START_SECONDS:.0f} s. {_tail(child)}") from error
            raise
        self.state = "ready"
        return child

    async def _until_ready(self, child: Child) -> Ready:
        while (event := await _next_event(child)) is not None:
            if isinstance(event, Ready):
                return event
            if isinstance(event, Failed):
                raise EngineError(event.message)
        await child.exited.wait()
        raise EngineError(f"The learner ended ({child.ending()}) before it was ready. {_tail(child)}")

    async def _events(self, child: Child, request_id: str) -> AsyncGenerator[Event]:
        silence = _Silence(child, self._step_timeout)
        while (event := await silence.next_event()) is not None:
            if isinstance(event, Ready) or event.request_id != request_id:
                continue  # a leftover of an earlier command whose reader went away
            yield event
            if isinstance(event, Trained | Merged | Failed):
                return
        self.state = "stopped"
        await child.exited.wait()
        killed = "the system may have run out of memory: lower row_tokens or logits_chunk, or send fewer groups. "
        why = silence.reason or (killed if child.returncode == -signal.SIGKILL else "")
        message = (
            f"The learner ended ({child.ending()}) before the step was saved; it was not applied. {why}{_tail(child)}"
        )
        yield Failed(request_id=request_id, reason="learner_died", message=message)

    def _argv(self) -> list[str]:
        options = self._options
        argv = [sys.executable, "-m", LEARNER_MODULE, "--base", str(self._base.path), "--name", self._base.reference]
        argv += ["--loader", options.loader, *(["--load-in-4bit"] if options.load_in_4bit else [])]
        argv += ["--device", options.device, "--dtype", options.dtype]
        argv += ["--threads", str(options.threads)] if options.threads is not None else []
        return argv + (["--deterministic"] if options.deterministic else [])

    def _env(self) -> dict[str, str]:
        """The GPU that trains is the only one that the child sees; what Unsloth generates stays beside our logs."""
        gpus = ",".join(map(str, self._options.train_gpus))
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        return {"UNSLOTH_COMPILE_LOCATION": str(self._log_path.parent / "unsloth_compiled_cache"), **order}


class _Silence:
    """Waits for a learner's events, and ends a learner that gives none for `seconds`: it hangs, or is stopped."""

    def __init__(self, child: Child, seconds: float | None) -> None:
        self._child = child
        self._seconds = seconds
        self._told = False
        self.reason = ""
        """Why it was ended here."""

    async def next_event(self) -> Event | None:
        """The next event; None when the learner closed its stdout."""
        began = time.monotonic()
        while True:
            try:
                return await asyncio.wait_for(_next_event(self._child), HEARTBEAT_SECONDS)
            except TimeoutError:
                self._look(time.monotonic() - began)

    def _look(self, silent: float) -> None:
        stopped = self._is_stopped()
        if stopped and not self._told:
            self._told = True
            pid = self._child.pid
            log.error("The learner is stopped (SIGSTOP, or a debugger); `kill -CONT %d` lets the step go on", pid)
        if self._seconds is not None and silent > self._seconds and not self.reason:
            state = "was stopped" if stopped else "gave no sign of progress"
            self.reason = (
                f"It {state} for {silent:.0f} s, and was ended: raise --step-timeout if its work takes so long. "
            )
            self._child.kill()

    def _is_stopped(self) -> bool:
        try:
            return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False


async def _send(child: Child, command: TrainCommand | MergeCommand | StopCommand) -> None:
    try:
        child.stdin.write(command.model_dump_json().encode() + b"\n")
        await child.stdin.drain()
    except ConnectionError as error:
        raise EngineError(f"The learner ended ({child.ending()}). {_tail(child)}") from error


async def _next_event(child: Child) -> Event | None:
    """The next event; None when the learner closed its stdout. Lines that are no event are logged."""
    while line := await child.stdout.readline():
        try:
            return EVENTS.validate_json(line)
        except ValidationError:
            log.warning("The learner wrote a line that is no event: %r", line[:200])
    return None


def _tail(child: Child) -> str:
    return f"The last lines of {child.log.path}:\n{child.log.tail()}"
