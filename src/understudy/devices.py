"""The GPUs that this process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES tell them: for processes that import no torch."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,memory.total,memory.free,compute_cap,uuid"
_SECONDS = 20.0
_MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """`index` is nvidia-smi's. Memory in bytes. `capability` is CUDA's compute capability, such as (8, 0)."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    uuid: str = ""

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
    """Those that CUDA_VISIBLE_DEVICES shows, in its order; without it all, by index. None where there is no NVIDIA driver. A
    driver that fails is logged, and counts as none."""
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
        return visible(tuple(_gpu(line) for line in told.splitlines() if line.strip()), os.environ.get(VISIBLE))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("nvidia-smi failed (%s); no GPU is used unless --device says so", error)
        return ()


def visible(found: tuple[Gpu, ...], shown: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES shows: indices, or UUIDs or how one begins. As CUDA reads it, the list
    ends at the first entry that names none; that entry is logged. None shows all."""
    if shown is None:
        return found
    kept: list[Gpu] = []
    for entry in (part.strip() for part in shown.split(",")):
        named = [
            gpu for gpu in found if (entry == str(gpu.index) or (entry[:1].isalpha() and gpu.uuid.startswith(entry)))
        ]
        if len(named) != 1 or named[0] in kept:
            if entry not in ("", "-1"):
                mig = ", and parts of a GPU (MIG) cannot be planned for" if entry.startswith("MIG") else ""
                log.warning("%s=%s: %r names none of this machine's GPUs once%s", VISIBLE, shown, entry, mig)
            break
        kept += named
    return tuple(kept)


def chosen(indices: tuple[int, ...], found: tuple[Gpu, ...], option: str) -> tuple[Gpu, ...]:
    """The GPUs of these indices; the first one for none. Raises ConfigError naming the option."""
    by_index = {gpu.index: gpu for gpu in found}
    missing = [index for index in indices if index not in by_index]
    if missing:
        have = ", ".join(str(index) for index in by_index) or "none"
        only = f" that {VISIBLE}={os.environ[VISIBLE]} shows" if os.environ.get(VISIBLE) is not None else ""
        raise ConfigError(f"--{option}: this machine has no GPU {missing[0]}{only} (it has: {have})")
    return tuple(by_index[index] for index in indices) or found[:1]


def _gpu(line: str) -> Gpu:
    index, name, total, free, capability, uuid = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(int(index), name, int(total) * _MIB, int(free) * _MIB, (int(major), int(minor)), uuid)
