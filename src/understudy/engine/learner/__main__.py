# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""The learner's process: commands as JSON lines on stdin, events as JSON lines on the original stdout.

python -m understudy.engine.learner --base DIR [--loader auto|peft] [--device D] [--dtype T] [--threads N]
[--deterministic] [--name NAME]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import TextIO

import torch
from pydantic import ValidationError

from ...config import LoraOptions
from ...errors import UnderstudyError
from ..protocol import COMMANDS, Command, Event, Failed, MergeCommand, Merged, Ready, StopCommand, TrainCommand, Trained
from .failures import describe_failure
from .learner import Learner
from .mask_probe import mask_probe
from .merge import merge
from .policy import Policy

PARENT_DIED = 3
"""Exit code when stdin ended without a stop command."""


class Service:
    """Answers commands one at a time with events."""

    def __init__(self, arguments: argparse.Namespace, events: TextIO) -> None:
        self._base = Path(arguments.base)
        self._events = events
        self._device_broken = False
        self._policy = Policy.load(
            self._base,
            LoraOptions(),
            device_name(arguments.device),
            dtype_of(arguments.dtype, device_name(arguments.device)),
            threads=arguments.threads,
            deterministic=arguments.deterministic,
            loader=arguments.loader,
            name=arguments.name,
        )
        self.learner = Learner(self._policy, arguments.name or str(self._base), self.emit)

    def emit(self, event: Event) -> None:
        """Write one event."""
        self._events.write(event.model_dump_json() + "\n")
        self._events.flush()

    def ready(self) -> Ready:
        """Probe the model; what the learner is."""
        probe = mask_probe(self._policy)
        if not probe.ok:
            print(f"The token tree is off for this model, plain rows are used: {probe.reason}", file=sys.stderr)
        weight = next(self._policy.model.parameters())
        return Ready(
            facts={
                "device": str(weight.device),
                "dtype": str(self._policy.dtype).removeprefix("torch."),
                "loader": "peft",
                "parameters": str(sum(p.numel() for p in self._policy.model.parameters() if not p.requires_grad)),
                "threads": str(torch.get_num_threads()),
                "deterministic": str(torch.are_deterministic_algorithms_enabled()),
                "mask_probe": f"ok, differs by {probe.max_difference:.1e} nats"
                if probe.ok
                else f"refused: {probe.reason}",
            }
        )

    def run(self, commands: Iterable[Command]) -> None:
        """Until a stop command."""
        for command in commands:
            if isinstance(command, StopCommand):
                return
            self.emit(self.answer(command))
            if self._device_broken:
                print("The learner ends: its device fails every call from now on", file=sys.stderr)
                return

    def answer(self, command: TrainCommand | MergeCommand) -> Event:
        """The last event of a command. Any failure is an answer: the process goes on, unless its device is lost."""
        try:
            if isinstance(command, TrainCommand):
                return Trained(request_id=command.request_id, result=self.learner.train(command))
            path = merge(self._base, command.adapter, command.output, self._policy.dtype)
            return Merged(request_id=command.request_id, path=path)
        except Exception as error:  # noqa: BLE001  # the boundary of the process: the server gets every failure as an event
            place = command.checkpoints if isinstance(command, TrainCommand) else command.output
            reason, message = describe_failure(error, place)
            self._device_broken = isinstance(error, torch.AcceleratorError) and reason != "out_of_memory"
            return Failed(request_id=command.request_id, reason=reason, message=message)


def read_commands(stream: TextIO) -> Iterator[Command]:
    """Commands as they come. When the stream ends before a stop command the parent has died: the process ends at once,
    so that it cannot write beside its successor; checkpoints are whole at any moment."""
    queue: Queue[Command] = Queue()

    def read() -> None:
        for line in stream:
            try:
                command = COMMANDS.validate_json(line)
            except ValidationError as error:
                print(
                    f"The learner got a line that is no command: {line[:200]!r}: {error}", file=sys.stderr, flush=True
                )
                os._exit(2)
            queue.put(command)
            if isinstance(command, StopCommand):
                return
        print("The learner ends: its parent is gone", file=sys.stderr, flush=True)
        os._exit(PARENT_DIED)

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        yield queue.get()


def device_name(asked: str) -> str:
    """`auto` takes cuda, then cpu."""
    return asked if asked != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(asked: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 on cuda, else float32."""
    if asked == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }[asked]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m understudy.engine.learner", description="Understudy's learner.")
    parser.add_argument("--base", required=True, help="folder of the base model")
    parser.add_argument("--name", default=None, help="the base's name, written into adapters (default: the folder)")
    parser.add_argument("--loader", choices=("auto", "peft"), default="auto", help="who loads the base")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"), default="auto", help="of the base"
    )
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    parser.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms")
    return parser.parse_args(argv)


def original_stdout() -> TextIO:
    """The stdout that the process was given, for events only; file descriptor 1 becomes stderr, also for C libraries."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return events


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Serve until a stop command, SIGTERM or the end of stdin."""
    arguments = parse(argv)
    events = original_stdout()
    signal.signal(signal.SIGTERM, _end)
    commands = read_commands(sys.stdin)
    try:
        service = Service(arguments, events)
        ready = service.ready()
    except (UnderstudyError, OSError, ValueError, RuntimeError) as error:
        reason, message = describe_failure(error, Path(arguments.base))
        events.write(
            Failed(request_id="", reason=reason, message=f"The learner did not start: {message}").model_dump_json()
            + "\n"
        )
        events.flush()
        return 1
    service.emit(ready)
    service.run(commands)
    return 0


if __name__ == "__main__":
    sys.exit(main())
