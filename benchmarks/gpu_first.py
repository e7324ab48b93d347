"""The first minutes on a GPU: the driver, how torch pins host memory, and the learner as users get it, loaded by each
loader, with the verdict of its probe.

    python benchmarks/gpu_first.py --shape 0.5B --output FOLDER

On a CPU (`--shape micro --device cpu`) nothing is pinned, and the PEFT loader alone is tried: a test of this script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from offbook.base.devices import driver_version, learner_settings

os.environ.update(learner_settings())  # read when torch is imported

import torch
from gpu_cases import SHAPES
from gpu_server import write_base, write_rows

from offbook.engine.protocol import EVENTS, LEARNER_MODULE, Ready, StopCommand

PINNED = 3 * 2**20
"""Bytes of a pinned block: 4 MiB where torch rounds it up to a power of two."""


def pinned() -> str:
    """What torch's host allocator holds after it pinned PINNED bytes."""
    block = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    held = {name: value for name, value in torch.cuda.host_memory_stats().items() if value and "bytes" in name}
    return f"{block.numel():,} bytes pinned: {held}"


def learner(base: Path, loader: str, device: str, log: Path) -> list[tuple[str, str]]:
    """The facts of a learner that was started with this loader, or why it did not start."""
    words = [sys.executable, "-m", LEARNER_MODULE, "--base", str(base), "--loader", loader, "--device", device]
    began = time.monotonic()
    with log.open("wb") as errors:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                return [(f"{loader}: ended", f"exit code {process.wait(60)}, see {log.name}")]
            event = EVENTS.validate_json(line)
            if not isinstance(event, Ready):
                return [(f"{loader}: failed", event.model_dump_json())]
            process.stdin.write(StopCommand().model_dump_json().encode() + b"\n")
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()
    facts = [(f"{loader}: {name}", value) for name, value in event.facts.items()]
    return [(f"{loader}: ready, s", f"{time.monotonic() - began:.1f}"), *facts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    on_gpu, folder = options.device == "cuda", options.output
    rows = [("driver", driver_version() or "none"), ("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")]
    if on_gpu:
        rows += [("GPU", torch.cuda.get_device_name()), ("host memory", pinned())]
    try:
        write_base(SHAPES[options.shape], folder / "base", options.device)
        if on_gpu:
            torch.cuda.empty_cache()
        for loader in ("peft", "unsloth") if on_gpu else ("peft",):  # Unsloth compiles, for minutes
            write_rows(rows, folder / "first.md")
            rows += learner(folder / "base", loader, options.device, folder / f"{loader}.txt")
    finally:
        shutil.rmtree(folder / "base", ignore_errors=True)
        write_rows(rows, folder / "first.md")


if __name__ == "__main__":
    main()
