"""Settings of torch's memory allocators for a child process: PYTORCH_ALLOC_CONF, read when torch is imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

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
