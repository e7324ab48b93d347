"""JSON schema validation with a time limit for patterns. Strangers write both the schema and the value, and Python's `re` may
need years for a short text, while no other thread runs."""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any, cast

parser: Any = importlib.import_module("re._parser")  # the public module has no parser
SECONDS = 1.0
"""Time limit of all searches in one `pattern_time` block, or of one search outside."""

_BOUNDS = re.compile(r"\{(\d*),?(\d*)\}", re.ASCII)
_DEADLINE: ContextVar[float | None] = ContextVar("offbook_pattern_deadline", default=None)


class SlowPatternError(ValueError):
    """A pattern did not end within its time."""


@contextmanager
def pattern_time() -> Generator[None]:
    """Limit the time of all searches inside to `SECONDS`."""
    token = _DEADLINE.set(time.monotonic() + SECONDS)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def compile_pattern(pattern: str) -> Any:
    """The compiled pattern. Raises ValueError for one that cannot be read, ImportError without the package `regex`."""
    regex: Any = importlib.import_module("regex")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


class TimedSearch:
    """What jsonschema's keywords use of the module `re`."""

    @staticmethod
    def search(pattern: str, text: str) -> object:
        """The match of a pattern in a text. Raises SlowPatternError, and ValueError for a pattern that cannot be read."""
        return _within_time(pattern, "search", text)


def full_match(pattern: str, text: str) -> bool:
    """Whether a pattern matches the whole text. Raises as `TimedSearch.search`."""
    return _within_time(pattern, "fullmatch", text) is not None


def _within_time(pattern: str, method: str, text: str) -> object:
    deadline = _DEADLINE.get()
    left = SECONDS if deadline is None else max(deadline - time.monotonic(), 1e-3)
    try:
        return getattr(compile_pattern(pattern), method)(text, timeout=left)
    except TimeoutError as error:
        raise SlowPatternError(f"the pattern {pattern!r:.200} takes longer than {SECONDS:g} s") from error


def written_out(pattern: str) -> int:
    """About how many characters a pattern has with each repeat written out; one without an upper limit is written as often
    as it must match, at least once. Raises re.error.

    >>> written_out("^(a{1,50}b){1,50}$"), written_out("(a+)+")
    (2552, 1)
    """
    return _written(parser.parse(pattern))


def product_of_repeats(pattern: str) -> int:
    """The product of all bounds `{n}` and `{n,m}` of a pattern that Python cannot parse, as if each were nested in the others.

    >>> product_of_repeats(r"^\\p{L}{1,64}@\\p{L}{2,}$")
    128
    """
    bounds = (max(int(number[:9] or 1) for number in repeat.groups("")) for repeat in _BOUNDS.finditer(pattern))
    return math.prod(max(bound, 1) for bound in bounds)


def _written(parsed: Any) -> int:
    length = 0
    for operation, argument in parsed:
        inner = sum(_written(part) for part in _parts(argument))
        times = 1
        if str(operation).endswith("_REPEAT"):
            least, most = argument[:2]
            times = max(least, 1 if most == parser.MAXREPEAT else most)
        length += times * max(inner, 1)
    return length


def _parts(argument: Any) -> list[Any]:
    if isinstance(argument, parser.SubPattern):
        return [argument]
    items = cast(list[Any], argument) if isinstance(argument, list | tuple) else []
    return [part for item in items for part in _parts(item)]


@cache
def with_timed_patterns(kind: Any) -> Any:
    """A validator class of jsonschema, whose keywords search with `TimedSearch`; also where a part of the schema names
    another draft. Raises ImportError."""
    validators: Any = importlib.import_module("jsonschema.validators")
    spaces: dict[str, dict[str, Any]] = {}
    keywords = {name: _timed(function, spaces) for name, function in kind.VALIDATORS.items()}
    timed = validators.extend(kind, keywords)
    timed.evolve = importlib.import_module("attrs").evolve  # jsonschema's own takes the class that `$schema` names
    return timed


def _timed(value: Any, spaces: dict[str, dict[str, Any]]) -> Any:
    """A function of jsonschema with `re` replaced in it and in what it calls. Other values are unchanged."""
    if not isinstance(value, FunctionType) or not value.__module__.startswith("jsonschema."):
        return value
    module = value.__module__
    if module not in spaces:
        space = spaces[module] = dict(value.__globals__)
        if "re" in space:
            space["re"] = TimedSearch
        for name, own in [*space.items()]:
            space[name] = _timed(own, spaces)
    function = value
    timed = FunctionType(
        function.__code__, spaces[module], function.__name__, function.__defaults__, function.__closure__
    )
    timed.__kwdefaults__ = function.__kwdefaults__
    return timed
