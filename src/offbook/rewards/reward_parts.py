"""Parts of a reward: functions that compare an answer with the expected one and return 0 (no match) to 1, and functions
that combine parts to a reward. Every part is logged as the metric `part/{name}`."""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, cast

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.schema_patterns import SlowPatternError, compile_pattern, pattern_time, with_timed_patterns
from offbook.base.types import Json

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


def schema_validator(schema: Mapping[str, Any], where: str) -> Any:
    """The validator of a schema, of its own draft or 2020-12. References lead to definitions in the schema: nothing is
    downloaded. Raises ConfigError that begins with `where`, MissingExtraError."""
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
        referencing: Any = importlib.import_module("referencing")
    except ImportError as error:
        raise MissingExtraError("jsonschema", "judge") from error
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        specification = importlib.import_module("referencing.jsonschema").DRAFT202012
        resolver = referencing.Registry().resolver_with_root(specification.create_resource(schema))
        for name, value in _fields(schema):
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                resolver.lookup(value)
            for pattern in (value,) if name == "pattern" else value if name == "patternProperties" else ():
                compile_pattern(str(pattern))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    except referencing.exceptions.Unresolvable as error:
        raise ConfigError(
            f"{where}: the reference {error.ref!r} does not lead to a definition in the schema"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: a pattern that Python cannot read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply") from error
    return with_timed_patterns(kind)(schema, registry=referencing.Registry())


def answer_fault(answer: str, validator: Any = None) -> str:
    """Why a text is no JSON, or does not fit; "" if it does. `validator`: of `schema_validator`."""
    try:
        value: Json = json.loads(answer)
        with pattern_time():
            fault: Any = None if validator is None else next(validator.iter_errors(value), None)
    except SlowPatternError as error:
        return f"not checked to the end: {error}"
    except ValueError as error:
        return f"no JSON: {error}"
    except RecursionError:
        return "nested too deeply, or its schema refers to itself without end"
    return "" if fault is None else f"{fault.json_path}: {fault.message}"


def _fields(schema: object) -> Iterator[tuple[str, Any]]:
    """Every name and value in a schema, however deep."""
    left: list[object] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            fields = cast(Mapping[str, object], part)
            yield from fields.items()
            left += fields.values()
        elif isinstance(part, list):
            left += cast(list[object], part)
