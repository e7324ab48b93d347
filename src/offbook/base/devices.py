"""The GPUs that this process may use, by nvidia-smi and CUDA_VISIBLE_DEVICES, without importing torch."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,memory.total,memory.free,compute_cap,uuid"
_SECONDS = 20.0
_MIB = 2**20
LEAST_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> the oldest branch of NVIDIA's driver for Linux that runs it (CUDA's release notes, table 3)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index` is nvidia-smi's; `total` and `free` are bytes; `capability` is CUDA's compute capability, such as
    (8, 0)."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    uuid: str = ""

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16."""
        return has_bfloat16(self.capability)


def has_bfloat16(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability computes in bfloat16: Ampere and newer."""
    return capability >= (8, 0)


def automatic_dtype(capabilities: Sequence[tuple[int, int]]) -> str:
    """The precision that `--dtype auto` stands for on GPUs of these capabilities: bfloat16, or float16 if one of them
    lacks it; float32 without a GPU.

    >>> automatic_dtype([(8, 0), (7, 5)]), automatic_dtype([])
    ('float16', 'float32')
    """
    if not capabilities:
        return "float32"
    return "bfloat16" if all(map(has_bfloat16, capabilities)) else "float16"


def gpus() -> tuple[Gpu, ...]:
    """The GPUs in the order of CUDA_VISIBLE_DEVICES; if it is not set, all by index. Empty without an NVIDIA driver.

    A GPU without a figure for its memory or capability is left out, and logged. A driver that fails is logged, and the
    result is empty."""
    installed: list[Gpu] = []
    for line in _ask(_QUERY):
        try:
            installed.append(_gpu(line))
        except ValueError as error:
            logger.warning("nvidia-smi gives no usable figures for a GPU, which is not used (%s): %s", error, line)
    return visible(tuple(installed), os.environ.get(VISIBLE))


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as 580.65.06; None without one."""
    return next((line for line in _ask("driver_version") if re.fullmatch(r"\d+(\.\d+)+", line)), None)


def driver_fault(cuda: str, driver: str | None) -> str | None:
    """What is wrong with a driver for a torch that was built for this version of CUDA; None if nothing is known.

    >>> driver_fault("13.0", "570.86.15")
    'driver 570.86.15 is too old for CUDA 13.0, which needs 580 or newer'
    """
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]))
    if least is None or driver is None or int(driver.partition(".")[0]) >= least:
        return None
    return f"driver {driver} is too old for CUDA {cuda}, which needs {least} or newer"


def _ask(query: str) -> list[str]:
    """nvidia-smi's answer, a line per GPU. Empty without nvidia-smi, and, with a warning, if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        output = subprocess.run(
            [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi failed (%s); no GPU is used unless --device names one", error)
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def visible(installed: tuple[Gpu, ...], shown: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES shows; all for None.

    An entry is an index, a UUID or the start of one. As in CUDA, the list ends at the first entry that is not exactly
    one GPU; that entry is logged."""
    if shown is None:
        return installed
    kept: list[Gpu] = []
    for entry in (part.strip() for part in shown.split(",")):
        named = [
            gpu
            for gpu in installed
            if (entry == str(gpu.index) or (entry[:1].isalpha() and gpu.uuid.startswith(entry)))
        ]
        if len(named) != 1 or named[0] in kept:
            if entry not in ("", "-1"):
                mig = "; a part of a GPU (MIG) is not supported" if entry.startswith("MIG") else ""
                logger.warning(
                    "%s=%s: %r does not name exactly one more GPU of this machine; it and later entries are ignored%s",
                    VISIBLE,
                    shown,
                    entry,
                    mig,
                )
            break
        kept += named
    return tuple(kept)


def chosen(indices: tuple[int, ...], available: tuple[Gpu, ...], option: str) -> tuple[Gpu, ...]:
    """The GPUs with these indices; the first available one for no indices. Raises ConfigError that names the option."""
    by_index = {gpu.index: gpu for gpu in available}
    missing = [index for index in indices if index not in by_index]
    if missing:
        have = ", ".join(str(index) for index in by_index) or "none"
        only = f" that {VISIBLE}={os.environ[VISIBLE]} shows" if os.environ.get(VISIBLE) is not None else ""
        raise ConfigError(f"--{option}: this machine has no GPU {missing[0]}{only} (it has: {have})")
    return tuple(by_index[index] for index in indices) or available[:1]


def visible_to(indices: tuple[int, ...]) -> dict[str, str]:
    """Environment of a process that is to see these GPUs alone, in nvidia-smi's order."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(map(str, indices))}


def _gpu(line: str) -> Gpu:
    index, name, total, free, capability, uuid = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(int(index), name, int(total) * _MIB, int(free) * _MIB, (int(major), int(minor)), uuid)
