"""JSON values that are stored and returned unchanged. JSON has no NaN and no infinity: they would come back as null."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, cast

from pydantic import AfterValidator

from .types import Json


def _storable(value: Json) -> Json:
    """Reject NaN and infinity anywhere inside `value`."""
    try:
        json.dumps(value, allow_nan=False)  # in C; the search below takes a hundred times as long
    except (ValueError, TypeError, RecursionError):
        return _searched(value)
    return value


def _searched(value: Json) -> Json:
    if (fault := _not_finite(value)) is not None:
        raise ValueError(f"JSON has no NaN and no infinity, got {fault}")
    return value


def _not_finite(value: Json, path: str = "") -> str | None:
    """The first number inside `value` that is not finite, and its path."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value!r}{path and f' at {path}'}"
    children: Iterable[tuple[Json, Json]] = ()
    if isinstance(value, dict):
        children = cast(dict[Json, Json], value).items()
    elif isinstance(value, list | tuple):
        children = enumerate(cast(Sequence[Json], value))
    faults = (_not_finite(child, f"{path}[{key!r}]") for key, child in children)
    return next((fault for fault in faults if fault is not None), None)


StoredJson = Annotated[Json, AfterValidator(_storable)]
"""A JSON value that is returned exactly as it was stored. Validation rejects NaN and infinity."""
