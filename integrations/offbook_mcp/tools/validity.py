"""Whether a JSON schema accepts a value."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from offbook.base.schema_patterns import SlowPatternError, pattern_time, with_timed_patterns

from .tool import Schema

logger = logging.getLogger("offbook")

_NO_REGISTRY: Any = cast(Any, Registry)()
"""Without remote schemas: jsonschema would download them."""
_FORMATS = FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


def checker(schema: Schema, without: frozenset[str] = frozenset()) -> Callable[[object], bool]:
    """A function that tells whether the schema accepts a value. A schema that cannot be applied accepts everything.

    without: properties of the value whose faults do not count. References out of the schema are not followed.
    """
    validator = with_timed_patterns(Draft202012Validator)(schema, registry=_NO_REGISTRY, format_checker=_FORMATS)
    slow = False

    def accepts(value: object) -> bool:
        nonlocal slow
        if slow:
            return True
        try:
            with pattern_time():
                faults: list[Any] = list(validator.iter_errors(value))
        except SlowPatternError as error:
            slow = True  # the next value would take as long
            logger.warning("a JSON schema is not checked: %s", error)
            return True
        except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError, AttributeError):
            return True  # such as a `pattern` in JavaScript's syntax
        return all(_concerns(fault, without) for fault in faults)

    return accepts


def _concerns(fault: Any, names: frozenset[str]) -> bool:
    """Whether a fault is about these properties: one of their values, or that one is missing."""
    path = list(fault.absolute_path)
    if path:
        return path[0] in names
    required = cast(list[str], fault.validator_value) if fault.validator == "required" else []
    return any(f"'{name}'" in fault.message for name in names & frozenset(required))
