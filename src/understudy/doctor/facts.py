"""Facts about torch, vLLM and Unsloth. Another process imports each of them and reports as JSON."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

FACTS_MODULE = "understudy.engine.facts"
FACTS_SECONDS = 180.0
"""Time limit of such a process. The first import of these packages takes most of a minute on a busy machine."""

Facts = TypeVar("Facts", bound=BaseModel)


class Device(BaseModel):
    """A GPU; `total` and `free` memory in bytes."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    total: int
    free: int
    capability: str
    bfloat16: bool


class TorchFacts(BaseModel):
    """What torch reports. `devices` are the GPUs that torch can use; `driver_gpus` are the names of those that the
    driver lists."""

    model_config = ConfigDict(frozen=True)

    version: str
    build: str
    threads: int
    devices: tuple[Device, ...] = ()
    mps: bool = False
    driver_gpus: tuple[str, ...] = ()


class EngineFacts(BaseModel):
    """vLLM or Unsloth can be imported, and runs on this `platform`."""

    model_config = ConfigDict(frozen=True)

    platform: str


class Broken(BaseModel):
    """The package is installed but does not work. `why` is one line."""

    model_config = ConfigDict(frozen=True)

    why: str


def query_facts(subject: str, kind: type[Facts], seconds: float = FACTS_SECONDS) -> Facts | Broken:
    """The facts about `torch`, `vllm` or `unsloth`. Never raises: a failed import or a time-out is returned as
    `Broken`."""
    with tempfile.TemporaryDirectory(prefix="understudy-doctor-") as folder:  # Unsloth writes into the current one
        try:
            done = subprocess.run(
                [sys.executable, "-m", FACTS_MODULE, subject],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Broken(why=f"its import did not finish within {seconds:.0f} s")
    if done.returncode < 0:
        return Broken(why=f"its import was killed by signal {-done.returncode}{_last_line(done.stderr, ': ')}")
    if done.returncode > 0:
        return Broken(why=_last_line(done.stderr) or f"its import ended with exit code {done.returncode}")
    try:
        return kind.model_validate_json(done.stdout)
    except ValidationError:
        return Broken(why=f"its facts cannot be read: {done.stdout.strip()[:200]!r}")


def _last_line(text: str, before: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{before}{lines[-1][:300]}" if lines else ""
