"""The learner's process: commands as JSON lines on stdin, events as JSON lines on the original stdout.

python -m offbook.engine.learner --base DIR [--loader auto|peft|unsloth] [--load-in-4bit] [--device D] [--dtype T]
[--threads N] [--deterministic] [--name NAME] [--offload] [--row-limit N] [--prompt-date DATE] [--learners N]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from pydantic import ValidationError

from offbook.base.errors import ConfigError, OffbookError
from offbook.base.terminal import echo

from ..precision import device_name
from ..protocol import COMMANDS, Command, Failed, StopCommand, add_prompt_date
from ..quick_imports import leave_with, quick_imports
from .failures import Memory, describe_failure
from .model import unsloth_loader

if TYPE_CHECKING:
    from .model.policy import Policy

PARENT_DIED = 3
"""Exit code when stdin ended without a stop command."""


def read_commands(stream: TextIO) -> Iterator[Command]:
    """Yield commands as they arrive, read in a thread.

    If the stream ends without a stop command, the parent has died. The process then exits at once, so that it cannot
    write beside its successor; this is safe because checkpoints are complete at any moment."""
    queue: Queue[Command] = Queue()

    def read() -> None:
        for line in stream:
            try:
                command = COMMANDS.validate_json(line)
            except ValidationError as error:
                echo(f"The learner got a line that is no command: {line[:200]!r}: {error}", err=True)
                os._exit(2)
            queue.put(command)
            if isinstance(command, StopCommand):
                return
        echo("The learner ends: its parent is gone", err=True)
        os._exit(PARENT_DIED)

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        yield queue.get()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m offbook.engine.learner", description="Offbook's learner.")
    parser.add_argument("--base", required=True, help="folder of the base model")
    parser.add_argument("--name", default=None, help="the base's name, written into adapters (default: the folder)")
    parser.add_argument(
        "--loader",
        choices=("auto", "peft", "unsloth"),
        default="auto",
        help="who loads the base; auto: unsloth where it is installed and the device is CUDA",
    )
    parser.add_argument("--load-in-4bit", action="store_true", help="hold the base in 4 bits (bitsandbytes)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"), default="auto", help="of the base"
    )
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    parser.add_argument("--offload", action="store_true", help="be in host memory between steps, pinned for a GPU")
    parser.add_argument("--row-limit", type=int, default=None, help="tokens of a row, whatever a job asks for")
    parser.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms")
    add_prompt_date(parser)
    parser.add_argument("--learners", type=int, default=1, help="processes that compute a step together")
    parser.add_argument("--rank", type=int, default=0, help="which of them; others than 0 take their tasks from stdin")
    return parser.parse_args(argv)


def original_stdout() -> TextIO:
    """Reserve the process's stdout for events and return it. File descriptor 1 becomes stderr, also for C libraries."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return events


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Serve until a stop command, SIGTERM or the end of stdin. Returns the exit code: 1 if the learner did not
    start."""
    arguments = parse(argv)
    if arguments.rank:
        return _follow(arguments)
    events = original_stdout()
    signal.signal(signal.SIGTERM, _end)
    commands = read_commands(sys.stdin)
    try:
        gpus = _gpus_of_team(arguments.learners)
        loader = _choose_device(arguments)
        with quick_imports(Path(arguments.base), quantizers=_needs_quantizers(arguments, loader)):
            from .service import Service
            from .team import Team

            words = sys.argv[1:] if argv is None else argv
            team = Team.start(words, arguments.learners, gpus) if arguments.learners > 1 else None
            service = Service(arguments, events, team)
        ready = service.ready()
    except (OffbookError, OSError, ValueError, RuntimeError) as error:
        memory = Memory(arguments.device, arguments.load_in_4bit, loading=True)
        reason, message = describe_failure(error, Path(arguments.base), memory)
        failed = Failed(request_id="", reason=reason, message=f"The learner did not start: {message}")
        events.write(failed.model_dump_json() + "\n")
        events.flush()
        return 1
    service.emit(ready)
    service.run(commands)
    return 0


def _gpus_of_team(learners: int) -> list[str]:
    """The GPU of each learner, if CUDA_VISIBLE_DEVICES names one for each. This process keeps the first."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if learners == 1 or len(gpus) != learners:
        return []
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    return gpus


def _choose_device(arguments: argparse.Namespace) -> str:
    """Resolve the device and return the loader. Import Unsloth where it loads the base: it patches transformers only when
    it comes first, so `service` and `team` are imported after this. Raises ConfigError."""
    arguments.device = device_name(arguments.device)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if arguments.learners > 1 and arguments.device != "cpu" and (not gpus or "," in gpus):
        raise ConfigError(
            f"--learners {arguments.learners}: name a GPU for each (--train-gpus 0,1), or take --device cpu"
        )
    loader = unsloth_loader.choose(arguments.loader, arguments.device)
    if loader == "unsloth":
        unsloth_loader.import_first()
    return loader


def _needs_quantizers(arguments: argparse.Namespace, loader: str) -> bool:
    return arguments.load_in_4bit or loader == "unsloth"


def _follow(arguments: argparse.Namespace) -> int:
    """Answer the tasks of the first learner. This process's stdin is one end of a socket pair."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group's; the first learner handles it, and ends this one
    connection = Connection(os.dup(0))
    refused: Exception | None = None
    loader = ""
    try:
        loader = _choose_device(arguments)
    except Exception as error:  # noqa: BLE001  # told to the first learner, like all that keeps the base from loading
        refused = error
    from .team import follow

    def load() -> Policy:
        if refused is not None:
            raise refused
        with quick_imports(Path(arguments.base), quantizers=_needs_quantizers(arguments, loader)):
            from .service import load_policy, probes
        policy = load_policy(arguments)
        probes(policy)
        return policy

    follow(connection, load, arguments.device)
    return 0


if __name__ == "__main__":
    leave_with(main)
