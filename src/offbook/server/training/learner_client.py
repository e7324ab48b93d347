"""The client of the learner process: commands go to its stdin, events come from its stdout, one command at a time."""

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

from offbook.base.devices import learner_settings, visible_to
from offbook.base.errors import EngineError
from offbook.base.server_options import EngineOptions

from ...engine.protocol import (
    EVENTS,
    LEARNER_MODULE,
    Command,
    Event,
    Failed,
    LastEvent,
    MergeCommand,
    Ready,
    ScoreCommand,
    StopCommand,
    TrainCommand,
    prompt_date_words,
)
from ..base_model import BaseModelPath
from ..child_process import Child

logger = logging.getLogger(__name__)

START_SECONDS = 900.0
"""Limit for loading the base."""
HEARTBEAT_SECONDS = 5.0
"""After this time without an event, the learner is checked for a hang or a stop."""

State = Literal["stopped", "starting", "ready"]
"""ready: the base is loaded, and a command may be running."""


class LearnerClient:
    """A learner process. `start` loads it in the background; a command starts it again if it has died."""

    def __init__(
        self,
        base: BaseModelPath,
        options: EngineOptions,
        log_path: Path,
        step_timeout: float | None = None,
        *,
        offload: bool = False,
        row_limit: int | None = None,
    ) -> None:
        """`step_timeout`: the learner is killed after so many seconds without an event (None: never).

        `offload`: the learner stays in host memory between steps. `row_limit`: largest row in tokens; it overrides a
        job's larger row_tokens.
        """
        self._base = base
        self._options = options
        self._log_path = log_path
        self._step_timeout = step_timeout
        self._offload = offload
        self._row_limit = row_limit
        self._child: Child | None = None
        self._one_at_a_time = asyncio.Lock()
        self._early: asyncio.Task[None] | None = None
        self._stopping = False
        self._busy = False
        self.state: State = "stopped"
        self._facts: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._linear_layers: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, str]:
        """What the learner said when it was ready, and what was noted since."""
        return {**self._facts, **self._notes}

    def note(self, name: str, value: str) -> None:
        """Add a fact about the learner that a restart keeps."""
        self._notes[name] = value

    @property
    def pid(self) -> int | None:
        """The process id of the running learner; None if it does not run."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    def start(self) -> None:
        """Load the learner in the background, so that the first step does not wait for it."""
        self._early = asyncio.create_task(self._start_early(), name="learner")

    async def started(self) -> None:
        """Wait until the loading that `start` began has succeeded or failed."""
        if self._early is not None:
            await asyncio.wait({self._early})

    async def linear_layers(self) -> tuple[str, ...]:
        """The names of the base's linear layers, after the loading that `start` began; empty if it failed."""
        await self.started()
        return self._linear_layers

    async def run(self, command: TrainCommand | MergeCommand | ScoreCommand) -> AsyncGenerator[Event]:
        """Run a command and yield its events.

        The last is Trained, Merged, CompletionScored or Failed; a learner that dies yields Failed.
        """
        async with self._one_at_a_time:
            try:
                child = await self._running()
                await _send(child, command)
            except EngineError as error:
                yield Failed(request_id=command.request_id, reason="failed", message=str(error))
                return
            self._busy = True
            async for event in self._events(child, command.request_id):
                if isinstance(event, LastEvent):
                    self._busy = False
                yield event

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop the learner within about `deadline` seconds. A running command is not applied."""
        self._stopping = True
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
        """Kill the learner without waiting."""
        if self._child is not None:
            self._child.kill()

    async def _start_early(self) -> None:
        async with self._one_at_a_time:
            try:
                await self._running()
            except EngineError as error:
                logger.error("The learner did not start; the next train request tries it again. %s", error)

    async def _running(self) -> Child:
        """The learner, started if necessary. Raises EngineError with the end of its log."""
        if self._stopping:
            raise EngineError("The server is shutting down")
        if self._child is not None and self._child.returncode is None and self.state == "ready":
            return self._child
        self.state = "starting"
        try:
            child = self._child = await Child.start(self._argv(), self._log_path, pipes=True, env=self._env())
        except OSError as error:
            self.state = "stopped"
            raise EngineError(f"The learner could not be started: {error}") from error
        except BaseException:
            self.state = "stopped"
            raise
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await self._until_ready(child)
        except BaseException as error:
            self.state = "stopped"
            self.kill()
            if isinstance(error, TimeoutError):
                raise EngineError(f"The learner was not ready within {START_SECONDS:.0f} s. {_tail(child)}") from error
            raise
        self._facts, self._linear_layers, self.state = ready.facts, ready.linear_layers, "ready"
        template = ready.facts.get("chat_template", "ok")
        if not template.startswith("ok"):
            logger.warning("The base's chat template: %s", template.removeprefix("warning: "))
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
        """The events of one command. If the learner ends, the last is a Failed that says why."""
        watch = _HangWatch(child, self._step_timeout)
        while (event := await watch.next_event()) is not None:
            if isinstance(event, Ready) or event.request_id != request_id:
                continue  # of an earlier command whose reader stopped listening
            yield event
            if isinstance(event, LastEvent):
                return
        self.state = "stopped"
        await child.exited.wait()
        out_of_memory = (
            "The system may have run out of memory: lower row_tokens or logits_chunk, or send fewer groups. "
        )
        why = watch.reason or (out_of_memory if child.returncode == -signal.SIGKILL else "")
        message = (
            f"The learner ended ({child.ending()}) before the step was saved; it was not applied. {why}{_tail(child)}"
        )
        yield Failed(request_id=request_id, reason="learner_died", message=message)

    def _argv(self) -> list[str]:
        options = self._options
        words = [sys.executable, "-m", LEARNER_MODULE, "--base", str(self._base.path), "--name", self._base.reference]
        words += ["--loader", options.loader, *(["--load-in-4bit"] if options.load_in_4bit else [])]
        words += ["--device", options.device, "--dtype", options.dtype]
        words += ["--threads", str(options.threads)] if options.threads is not None else []
        words += prompt_date_words(options.prompt_date)
        words += ["--offload"] if self._offload else []
        words += ["--row-limit", str(self._row_limit)] if self._row_limit is not None else []
        words += ["--learners", str(options.team)] if options.team > 1 else []
        return words + (["--deterministic"] if options.deterministic else [])

    def _env(self) -> dict[str, str]:
        """Environment of the learner: it sees only its own GPUs, torch pins host memory without rounding it up, and
        Unsloth writes generated code beside the logs."""
        gpus = self._options.train_gpus
        order = visible_to(gpus) if gpus else {}
        compiled = str(self._log_path.parent / "unsloth_compiled_cache")
        return {"UNSLOTH_COMPILE_LOCATION": compiled, **learner_settings(), **order}


class _HangWatch:
    """Reads a learner's events, and kills a learner that sends none for `seconds` because it hangs or is stopped."""

    def __init__(self, child: Child, seconds: float | None) -> None:
        self._child = child
        self._seconds = seconds
        self._reported = False
        self.reason = ""
        """Why the learner was killed here; empty if it was not."""

    async def next_event(self) -> Event | None:
        """The next event; None when the learner closed its stdout."""
        began = time.monotonic()
        while True:
            try:
                return await asyncio.wait_for(_next_event(self._child), HEARTBEAT_SECONDS)
            except TimeoutError:
                self._check(time.monotonic() - began)

    def _check(self, silent: float) -> None:
        """Report a stopped learner, and kill it if it was silent for too many seconds."""
        stopped = self._is_stopped()
        if stopped and not self._reported:
            self._reported = True
            pid = self._child.pid
            logger.error("The learner is stopped (by SIGSTOP or a debugger); `kill -CONT %d` continues the step", pid)
        if self._seconds is not None and silent > self._seconds and not self.reason:
            state = "was stopped" if stopped else "showed no sign of progress"
            self.reason = (
                f"It {state} for {silent:.0f} s and was killed: raise --step-timeout if a step takes so long. "
            )
            self._child.kill()

    def _is_stopped(self) -> bool:
        try:
            return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False


async def _send(child: Child, command: Command) -> None:
    try:
        child.stdin.write(command.model_dump_json().encode() + b"\n")
        await child.stdin.drain()
    except ConnectionError as error:
        raise EngineError(f"The learner ended ({child.ending()}). {_tail(child)}") from error


async def _next_event(child: Child) -> Event | None:
    """The next event; None when the learner closed its stdout. Other lines are logged and skipped."""
    while line := await child.stdout.readline():
        try:
            return EVENTS.validate_json(line)
        except ValidationError:
            logger.warning("The learner wrote a line that is not an event: %r", line[:200])
    return None


def _tail(child: Child) -> str:
    return f"The last lines of {child.log.path}:\n{child.log.tail()}"
