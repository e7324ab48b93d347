"""Parts of a reward: functions that compare an answer with the expected one and return 0 (no match) to 1, and functions
that combine parts to a reward. Every part is logged as the metric `part/{name}`."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from offbook.base.errors import ConfigError

from .json_schemas import answer_fault, schema_validator
from .reward_result import RewardResult, as_reward

PART = "part/"
"""Prefix of the metrics of a reward's parts."""

Part = float | RewardResult
"""A number (or a bool), or the result of another function here."""


def weighted(parts: Mapping[str, Part], weights: Mapping[str, float] | None = None) -> RewardResult:
    """The weighted sum of the parts; a missing weight is 1. Raises ConfigError for a weight without a part.

    >>> weighted({"answer": 1.0, "format": 0.5}, {"answer": 2.0})
    RewardResult(reward=2.5, metrics={'part/answer': 1.0, 'part/format': 0.5})
    """
    factors = dict(weights or {})
    if unknown := [name for name in factors if name not in parts]:
        raise ConfigError(f"weighted: weights: there is no part {unknown[0]!r}; the parts are {', '.join(parts)}")
    results = {name: as_reward(part, f"weighted: {name}") for name, part in parts.items()}
    total = math.fsum(factors.get(name, 1.0) * result.reward for name, result in results.items())
    return RewardResult(total, _logged(results))


def gated(gates: Mapping[str, bool | float], reward: Part, *, closed: float = 0.0) -> RewardResult:
    """The reward if all gates are open (True, or above 0), else `closed`. Gates are logged as parts."""
    results = {name: as_reward(gate, f"gated: {name}") for name, gate in gates.items()}
    inside = as_reward(reward, "gated: reward")
    opened = all(result.reward > 0 for result in results.values())
    return RewardResult(inside.reward if opened else closed, {**inside.metrics, **_logged(results)})


def _logged(results: Mapping[str, RewardResult]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, result in results.items():
        metrics |= {f"{PART}{name}": result.reward, **result.metrics}
    return metrics


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(answer: str, expected: str, *, ignore_case: bool = True) -> float:
    """1 if both texts are equal after Unicode normalisation, else 0. White space at the ends, the length of white space
    inside, and (by default) case are ignored."""
    return float(_plain(answer, ignore_case) == _plain(expected, ignore_case))


def numeric_match(answer: str | float, expected: float, *, tolerance: float = 1e-6) -> float:
    """1 if the last number of the answer is close to `expected`, else 0. Raises ConfigError for invalid arguments.

    `tolerance` is relative, and absolute near 0. A comma groups digits, as in 1,250.5. A text without a number gets
    0."""
    if not math.isfinite(expected) or not tolerance >= 0:
        raise ConfigError(
            f"numeric_match: finite numbers are needed, got expected={expected!r}, tolerance={tolerance!r}"
        )
    numbers = [answer] if isinstance(answer, int | float) else _NUMBER.findall(answer)
    if not numbers:
        return 0.0
    value = float(str(numbers[-1]).replace(",", ""))
    return float(math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance))


def json_valid(answer: str, schema: Mapping[str, Any] | None = None) -> float:
    """1 if the answer is JSON and, if `schema` is set, validates against that JSON Schema; else 0. Raises ConfigError
    for an invalid schema, MissingExtraError without `jsonschema`."""
    return float(not answer_fault(answer, None if schema is None else schema_validator(schema, "json_valid: schema")))


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return plain.casefold() if ignore_case else plain
