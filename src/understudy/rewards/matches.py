"""Functions that compare an answer with the expected one. They return 0 (no match) to 1."""

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


def fuzzy_match(answer: str, expected: str, *, ignore_case: bool = True) -> float:
    """The similarity of both texts: `difflib`'s ratio 2M / T (Ratcliff and Obershelp), with M matching characters and T
    characters in total."""
    pair = _plain(answer, ignore_case), _plain(expected, ignore_case)
    return SequenceMatcher(None, *pair, autojunk=False).ratio()


def json_valid(answer: str, schema: Mapping[str, Any] | None = None) -> float:
    """1 if the answer is JSON and, if `schema` is set, validates against that JSON Schema; else 0. Raises ConfigError
    for an invalid schema, MissingExtraError without `jsonschema`."""
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
