"""The GPUs that this process may use, and torch's memory settings for its child processes, without importing torch."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .errors import ConfigError

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,memory.total,memory.free,compute_cap,uuid"
_SECONDS = 20.0
_MIB = 2**20
MIN_DRIVERS = {12: 525, 13: 580}
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
    least = MIN_DRIVERS.get(int(cuda.partition(".")[0]))
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


VARIABLE = "PYTORCH_ALLOC_CONF"
_OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable's deprecated name, which torch reads only where the new one is not set."""
_EXACT_MIB = 1
_FIRST_EXACT = (2, 13)
"""The first torch that has the setting below. Older ones end at the first use of CUDA when they meet a setting that they
do not know."""


def _has_exact(release: str) -> bool:
    """Whether this release of torch has the setting.

    >>> _has_exact("2.11.0+cu130"), _has_exact("2.13.0+cpu"), _has_exact("3.0.0a0")
    (False, True, True)
    """
    major, minor = release.split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_EXACT


def _exact_mib() -> int | None:
    try:
        return _EXACT_MIB if _has_exact(version("torch")) else None
    except PackageNotFoundError:  # a plan is made for another machine
        return _EXACT_MIB


EXACT_MIB = _exact_mib()
"""Pinned blocks larger than this many MiB get their exact size; None: this torch cannot. By default torch rounds each one
up to a power of two (`CachingHostAllocator.h` of torch 2.13), which nearly doubles the host copy of some bases."""
_EXACT = {} if EXACT_MIB is None else {"pinned_max_round_threshold_mb": str(EXACT_MIB)}


def sampler_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable for vLLM. Without expandable segments, which its sleep mode cannot use."""
    return _settings(_EXACT, environment)


def learner_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable for the learner: also expandable segments against fragmentation, save under WSL, which lacks them."""
    wsl = "microsoft" in platform.release().lower()
    return _settings(_EXACT if wsl else {**_EXACT, "expandable_segments": "True"}, environment)


def _settings(ours: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """`ours`, after the settings that the environment has. A setting of the environment has precedence.

    >>> _settings({"expandable_segments": "True"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    {'PYTORCH_ALLOC_CONF': 'max_split_size_mb:64,expandable_segments:True'}
    """
    theirs = environment.get(VARIABLE) or environment.get(_OLD_NAME) or ""
    added = [f"{name}:{value}" for name, value in ours.items() if name not in theirs]
    settings = [*([theirs] if theirs else []), *added]
    return {VARIABLE: ",".join(settings)} if settings else {}
