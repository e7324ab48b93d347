"""What a GPU does with Offbook, in independent stages of at most 9 minutes: scripts/gpu_check OUT [--set bare|full].

`bare` needs torch, transformers and peft: the token tree against plain rows with MFU and memory, and FlexAttention's
compile time. `full` needs Offbook's server with vLLM too: first the learner as users get it with each loader, in at most 5
minutes; then start, logprobs of vLLM against the learner, sleep, release and wake, swap, peak memory against the plan, with
Unsloth and with PEFT. Weights are random; nothing is downloaded. The table, OUT/gpu_check.md, is written
after every stage; a stage that fails or takes too long is a line of it, and the rest goes on. `--shape micro` is for a CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAGE_SECONDS = 530.0
FIRST_SECONDS = 300.0
"""Limit of the first stage of `full`."""


@dataclass(frozen=True)
class Stage:
    """`words`: a script of this folder and its arguments. It writes the Markdown `page` into the folder of the stage.
    `limit`: its seconds at most."""

    name: str
    words: tuple[str, ...]
    page: str
    limit: float = STAGE_SECONDS


@dataclass(frozen=True)
class Ended:
    """How a stage ended."""

    stage: Stage
    seconds: float
    ending: str


def stages(which: str, shapes: tuple[str, ...]) -> list[Stage]:
    """All stages of `bare`; `full` begins with the learner, and has those of the server after them."""
    on_cpu = shapes == ("micro",)
    device = ("--device", "cpu") if on_cpu else ()
    found: list[Stage] = []
    if which == "full":
        found.append(Stage("first", ("gpu_first.py", "--shape", shapes[0], *device), "first.md", FIRST_SECONDS))
    for shape in shapes:
        first = ("--shape", "check") if shape == "0.5B" else ()
        found.append(Stage(f"rows-{shape}", ("gpu.py", *first, "--shape", shape, *device), "gpu.md"))
        found.append(Stage(f"flex-{shape}", ("gpu_flex.py", "--shape", shape, *device), "flex.md"))
    if which == "full":
        layouts = ("side_by_side", "offload") if on_cpu else ("side_by_side", "free_cache", "offload")
        for shape in shapes:
            for loader in ("peft",) if on_cpu else ("unsloth", "peft"):
                words = ("gpu_server.py", "--shape", shape, "--loader", loader, *device, "--memory-layout")
                found += [
                    Stage(f"server-{shape}-{loader}-{layout}", (*words, layout), "server.md") for layout in layouts
                ]
    return found


def run(stage: Stage, folder: Path, limit: float) -> Ended:
    """Run a stage with everything that it prints in `log.txt`; its whole process group is ended after `limit` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    script, *words = stage.words
    began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *words, "--output", str(folder)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            ending = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ending = f"not done after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # a server ends its children
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    return Ended(stage, time.monotonic() - began, ending)


def page(ended: list[Ended], output: Path) -> str:
    """The table of stages, then what each measured."""
    lines = ["# What this GPU does", "", "| stage | seconds | ended |", "|---|---|---|"]
    lines += [f"| {each.stage.name} | {each.seconds:.0f} | {each.ending} |" for each in ended]
    for each in ended:
        lines += ["", f"## {each.stage.name}", ""]
        measured, log = output / each.stage.name / each.stage.page, output / each.stage.name / "log.txt"
        if measured.is_file():
            lines.append(measured.read_text("utf-8").strip())
        if each.ending != "ok":
            tail = log.read_text("utf-8", "replace").split("\n")[-15:]
            lines += ["", "```", *tail, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for gpu_check.md and a folder per stage")
    parser.add_argument("--set", choices=("bare", "full"), default="bare", dest="which")
    parser.add_argument("--shape", action="append", choices=("micro", "0.5B", "7B"), help="default: 0.5B and 7B")
    parser.add_argument("--stage", action="append", help="only these; default: all of the set")
    parser.add_argument("--limit", type=float, default=STAGE_SECONDS, help="seconds of a stage")
    options = parser.parse_args()
    known = stages(options.which, tuple(options.shape or ("0.5B", "7B")))
    names = [stage.name for stage in known]
    if unknown := set(options.stage or ()) - set(names):
        parser.error(f"--stage {', '.join(sorted(unknown))}: one of {', '.join(names)}")
    output: Path = options.output.absolute()
    ended: list[Ended] = []
    for stage in known:
        if options.stage and stage.name not in options.stage:
            continue
        print(f"{stage.name} ...", flush=True)
        ended.append(run(stage, output / stage.name, min(stage.limit, options.limit)))
        print(f"{stage.name}: {ended[-1].ending}, {ended[-1].seconds:.0f} s", flush=True)
        (output / "gpu_check.md").write_text(page(ended, output), "utf-8")
    if any(each.ending != "ok" for each in ended):
        raise SystemExit(f"not every stage went well: see {output / 'gpu_check.md'}")


if __name__ == "__main__":
    main()
