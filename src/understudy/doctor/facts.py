"""What torch, vLLM and Unsloth say of themselves, asked of processes of their own: none is imported here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

FACTS_MODULE = "understudy.engine.facts"
FACTS_SECONDS = 180.0
"""The first import of these packages on a busy machine takes most of a minute."""

Facts = TypeVar("Facts", bound=BaseModel)


class Device(BaseModel):
    """One GPU; memory in bytes."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    total: int
    free: int
    capability: str
    bfloat16: bool


class TorchFacts(BaseModel):
    """`devices` are those that torch can use, `driver_gpus` those that the driver knows."""

    model_config = ConfigDict(frozen=True)

    version: str
    build: str
    threads: int
    devices: tuple[Device, ...] = ()
    mps: bool = False
    driver_gpus: tuple[str, ...] = ()


class EngineFacts(BaseModel):
    """Of vLLM or Unsloth: it can be imported, for which platform."""

    model_config = ConfigDict(frozen=True)

    platform: str


class Broken(BaseModel):
    """The package is installed and does not work; `why` is one line."""

    model_config = ConfigDict(frozen=True)

    why: str


def ask(subject: str, kind: type[Facts], seconds: float = FACTS_SECONDS) -> Facts | Broken:
    """The facts on `torch`, `vllm` or `unsloth`; what goes wrong is an answer, too."""
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
            return Broken(why=f"its import gave no answer in {seconds:.0f} s")
    if done.returncode < 0:
        return Broken(why=f"its import ended by signal {-done.returncode}{_last_line(done.stderr, ': ')}")
    if done.returncode > 0:
        return Broken(why=_last_line(done.stderr) or f"its import ended with exit code {done.returncode}")
    try:
        return kind.model_validate_json(done.stdout)
    except ValidationError:
        return Broken(why=f"its facts cannot be read: {done.stdout.strip()[:200]!r}")


def _last_line(text: str, before: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{before}{lines[-1][:300]}" if lines else ""
