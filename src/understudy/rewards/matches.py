"""Matches of an answer with what was expected: plain functions, each from 0 (no match) to 1."""

from __future__ import annotations

import importlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from understudy.errors import ConfigError, MissingExtraError

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(answer: str, expected: str, *, ignore_case: bool = True) -> float:
    """1 where both say the same, but for white space at the ends and runs of it inside, and (by default) case."""
    return float(_plain(answer, ignore_case) == _plain(expected, ignore_case))


def numeric_match(answer: str | float, expected: float, *, tolerance: float = 1e-6) -> float:
    """1 where the answer's last number is within `tolerance` of `expected`, as a share of it (near 0: absolute). A comma
    groups digits, as in 1,250.5; text without a number is 0."""
    if not math.isfinite(expected) or not tolerance >= 0:
        raise ConfigError(
            f"numeric_match: finite numbers are needed, got expected={expected!r}, tolerance={tolerance!r}"
        )
    numbers = [answer] if isinstance(answer, int | float) else _NUMBER.findall(answer)
    if not numbers:
        return 0.0
    value = float(str(numbers[-1]).replace(",", ""))
    return float(math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance))


def fuzzy_match(answer: str, expected: str, *, ignore_case: bool = True) -> float:
    """How alike both are: `difflib`'s ratio 2M / T (Ratcliff and Obershelp), M characters in common of T in both."""
    pair = _plain(answer, ignore_case), _plain(expected, ignore_case)
    return SequenceMatcher(None, *pair, autojunk=False).ratio()


def json_valid(answer: str, schema: Mapping[str, Any] | None = None) -> float:
    """1 where the answer is JSON and, if a schema is named, fits that JSON Schema. Raises ConfigError for a schema that is
    none, MissingExtraError without `jsonschema`."""
    try:
        value: object = json.loads(answer)
    except ValueError:
        return 0.0
    return 1.0 if schema is None else float(_validator(schema).is_valid(value))


def _validator(schema: Mapping[str, Any]) -> Any:
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise MissingExtraError("jsonschema", "judge") from error
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"json_valid: schema: {error.message}") from error
    return kind(schema)


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return plain.casefold() if ignore_case else plain
