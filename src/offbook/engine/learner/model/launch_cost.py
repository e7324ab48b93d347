"""Measures how many operations a device does while one kernel launches, which the layout planner weighs launches by.

Measured once per card and version of torch, and kept in a file, so that later runs choose the same layouts."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from offbook.base.devices import has_bfloat16

logger = logging.getLogger(__name__)

LAUNCHES = 2000
SIZE = 4096
"""Rows and columns of the matrices that the rate is measured with."""
PRODUCTS = 10
PLAUSIBLE = (1e5, 1e11)
"""Operations per launch: between a slow CPU core and ten times the fastest card of 2026. Others are not believed."""


def kept_call_flops(file: Path, device: torch.device, fallback: float) -> float:
    """Operations per kernel launch of this card: from the file, else measured and added to it.

    The fallback, with a warning, if the measurement fails or is not plausible. A CPU always gets the fallback: its figure
    depends on other work, and the choice of layouts must not."""
    if device.type != "cuda":
        return fallback
    key = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    dtype = torch.bfloat16 if has_bfloat16(torch.cuda.get_device_capability(device)) else torch.float16
    return kept(file, key, lambda: measure(device, dtype), fallback)


def kept(file: Path, key: str, measured: Callable[[], float], fallback: float) -> float:
    """The value of `key` in the file. If there is none: `measured()`, rounded to two digits and written there."""
    known = _read(file)
    if key in known:
        return known[key]
    try:
        value = float(f"{measured():.1e}")
    except (RuntimeError, ZeroDivisionError) as error:
        logger.warning("Operations per kernel launch were not measured (%s); %.1e are assumed", error, fallback)
        return fallback
    if not PLAUSIBLE[0] <= value <= PLAUSIBLE[1]:
        logger.warning("%.1e operations per kernel launch are not plausible; %.1e are assumed", value, fallback)
        return fallback
    logger.info("%s: %.1e operations per kernel launch (assumed before: %.1e)", key, value, fallback)
    try:
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps({**known, key: value}, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, file)
    except OSError as error:
        logger.warning("%s was not written, so the next start measures again: %s", file, error)
    return value


def measure(device: torch.device, dtype: torch.dtype, size: int = SIZE) -> float:
    """Seconds of one launch times operations per second of a matrix product."""
    one = torch.zeros(1, device=device)
    square = torch.ones(size, size, device=device, dtype=dtype)
    launch = _seconds(device, lambda: one.add_(1), LAUNCHES)
    product = _seconds(device, lambda: square @ square, PRODUCTS)
    return launch * 2 * size**3 / product


def _seconds(device: torch.device, run: Callable[[], object], times: int) -> float:
    """Seconds of one of `times` runs, after one that is not counted."""
    run()
    _wait(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    _wait(device)
    return (time.perf_counter() - start) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(file: Path) -> dict[str, float]:
    """The values of the file; none if it is missing or damaged."""
    try:
        values: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is written anew: %s", file, error)
        return {}
    if not isinstance(values, dict):
        return {}
    entries = cast(dict[str, object], values)
    return {key: value for key, value in entries.items() if isinstance(value, float)}
