"""The GPUs of this machine, as nvidia-smi tells them: for processes that import no torch."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError

log = logging.getLogger(__name__)

_QUERY = "index,name,memory.total,memory.free,compute_cap"
_SECONDS = 20.0
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes. `capability` is CUDA's compute capability, such as (8, 0)."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]

    @property
    def has_bfloat16(self) -> bool:
        return has_bfloat16(self.capability)


def has_bfloat16(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability computes in bfloat16: Ampere and newer."""
    return capability >= (8, 0)


def automatic_dtype(capabilities: Sequence[tuple[int, int]]) -> str:
    """What `--dtype auto` stands for on these GPUs: bfloat16, float16 where one of them has none; float32 on a CPU."""
    if not capabilities:
        return "float32"
    return "bfloat16" if all(map(has_bfloat16, capabilities)) else "float16"


def gpus() -> tuple[Gpu, ...]:
    """By index; none where there is no NVIDIA driver. A driver that fails is logged, and counts as none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        told = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        ).stdout
        return tuple(_gpu(line) for line in told.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("nvidia-smi failed (%s); no GPU is used unless --device says so", error)
        return ()


def chosen(indices: tuple[int, ...], found: tuple[Gpu, ...], option: str) -> tuple[Gpu, ...]:
    """The GPUs of these indices; the first one for none. Raises ConfigError naming the option."""
    by_index = {gpu.index: gpu for gpu in found}
    missing = [index for index in indices if index not in by_index]
    if missing:
        have = ", ".join(str(index) for index in by_index) or "none"
        raise ConfigError(f"--{option}: this machine has no GPU {missing[0]} (it has: {have})")
    return tuple(by_index[index] for index in indices) or found[:1]


def _gpu(line: str) -> Gpu:
    index, name, total, free, capability = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(int(index), name, int(total) * _MIB, int(free) * _MIB, (int(major), int(minor)))
