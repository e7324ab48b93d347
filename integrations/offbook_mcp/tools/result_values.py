"""Reads the values in the text of a tool's result: JSON, Python, or a drawn table."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from offbook.base.json_files import too_deep

Structure: TypeAlias = dict[str, object] | list[object]

_OPENS = re.compile(r"```[\w+-]*[ \t]*")
_CLOSES = re.compile(r"```[ \t]*")
_RULE = re.compile(r"(?=[\s|+:=─━┼│┃╇┡┩╪═-]*?[-─━═=]{2})[\s|+:=─━┼│┃╇┡┩╪═┏┓┗┛┌┐└┘├┤┬┴-]+")
"""Its lookahead is lazy: of greedy repetitions of the same characters, each would be tried with each."""
_CELLS = re.compile(r"[|│┃]")
_LONGEST_READ = 200_000
"""Longer texts are text: reading them takes too long between two calls. What is shorter is read in linear time, whatever it says."""
_LONGEST_INTEGER = 1_000  # bits: longer ones cannot be printed
_PREFACE = 200
"""The most characters of an introduction such as `Found 3 parts:` before JSON or Python."""


def structure_of(text: str) -> Structure | None:
    """The values in a result's text as JSON; None if the text has none of the known notations.

    Rows of a table become objects by the names of its columns.

    >>> structure_of("| id | name |\\n|---|---|\\n| p1 | bolt |")
    [{'id': 'p1', 'name': 'bolt'}]
    """
    text = text.strip()
    if len(text) > _LONGEST_READ:
        return None
    if bodies := _fenced(text):
        parts = [structure for body in bodies if (structure := structure_of(body)) is not None]
        return parts[0] if len(parts) == 1 else cast(list[object], parts) or None
    for start in _starts(text):
        for reader in (_json, _python):
            if (value := reader(text[start:])) is not None:
                return value
    return _table(text)


def _fenced(text: str) -> list[str]:
    bodies: list[str] = []
    body: list[str] | None = None
    for line in text.split("\n") if "```" in text else ():
        if body is not None and _CLOSES.fullmatch(line):
            bodies.append("".join(body))
            body = None
        elif body is not None:
            body.append(f"{line}\n")
        elif _OPENS.fullmatch(line):
            body = []
    return bodies


def digest_of(text: str) -> str:
    """A hash of a result's values that ignores the notation, the order of rows and of columns, and the columns' names."""
    value: object = structure_of(text) or text
    while isinstance(value, Mapping) and len(named := cast(Mapping[str, object], value)) == 1:  # {"rows": [...]}
        value = next(iter(named.values()))
    rows: list[object] = cast(list[object], value) if isinstance(value, list) else [cast(object, value)]
    canonical = sorted(json.dumps(sorted(_plain(scalar) for scalar in scalars_of(row))) for row in rows)
    return hashlib.sha256(json.dumps(canonical).encode()).hexdigest()[:16]


def scalars_of(value: object) -> Iterator[object]:
    """All texts, numbers, booleans and nulls in a JSON value."""
    if isinstance(value, Mapping):
        for item in cast(Mapping[str, object], value).values():
            yield from scalars_of(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[object], value):
            yield from scalars_of(item)
    else:
        yield value


def with_scalars(value: object, change: Callable[[object], object]) -> object:
    """A JSON value with each text, number, boolean and null changed."""
    if isinstance(value, Mapping):
        return {key: with_scalars(item, change) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, list | tuple):
        return [with_scalars(item, change) for item in cast(Sequence[object], value)]
    return change(value)


def _plain(value: object) -> str:
    """A scalar as text: numbers with 9 significant digits, also those in a text; other text in lower case."""
    text = " ".join(str(value).split()).casefold()
    try:
        return f"{float(text):.9g}"
    except ValueError:
        return text


def _starts(text: str) -> Iterator[int]:
    """Where JSON or Python may start: at the beginning, or after a short introduction."""
    if text[:1] in ("{", "[", "(") or re.match(r"[A-Za-z_][\w.]*\(", text):
        yield 0
        return
    if match := re.search(r"(?<=[\s:=])[\[{(]", text[:_PREFACE]):
        yield match.start()


def _json(text: str) -> Structure | None:
    if text[0] not in "{[":
        return None
    decoder = json.JSONDecoder()
    values: list[object] = []
    place = 0
    try:
        while place < len(text):
            value, place = cast(tuple[object, int], decoder.raw_decode(text, place))
            values.append(value)
            place = _behind(text, place)
    except (ValueError, RecursionError):
        return None
    return _one_or_all(values, text)


def _behind(text: str, place: int) -> int:
    """The place of the next value: after white space and at most one comma."""
    match = re.compile(r"\s*,?\s*").match(text, place)
    return match.end() if match else place


def _python(text: str) -> Structure | None:
    """Python literals, on one line or one a line, and objects such as `Part(id=1)`, `Decimal("2.5")`."""
    whole = _python_value(text)
    if whole is not None:
        return _one_or_all([whole], text)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or len(lines) > 2_000:
        return None
    values = [_python_value(line.strip()) for line in lines]
    return None if any(value is None for value in values) else _one_or_all(cast(list[object], values), text)


def _python_value(text: str) -> Structure | None:
    if not text or text[-1] not in "]})":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            value = _evaluated(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
        return None  # TypeError: a list as a member of a set
    return cast(Structure, value) if isinstance(value, dict | list) else None


def _evaluated(node: ast.expr) -> object:
    """The value of a literal. A call is an object: its keywords, else its arguments. Raises ValueError for anything else."""
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _evaluated(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.Call):
        if node.keywords:
            return {word.arg: _evaluated(word.value) for word in node.keywords if word.arg is not None}
        values = [_evaluated(item) for item in node.args]
        return values[0] if len(values) == 1 else values
    value = cast(object, ast.literal_eval(node))
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        raise ValueError("an integer that is too long to print")
    return value


def _one_or_all(values: list[object], text: str) -> Structure | None:
    """The only value of a text, or all. None for a scalar, and for values that are nested too deeply to walk through."""
    if not values:
        return None
    whole = values[0] if len(values) == 1 else values
    deep = too_deep(whole, sum(map(text.count, "{[(")))
    return cast(Structure, whole) if isinstance(whole, dict | list) and not deep else None


def _table(text: str) -> Structure | None:
    """The rows of tables that are drawn with lines, such as those of Markdown and of database shells."""
    lines = text.splitlines()
    if not any(_RULE.fullmatch(line) for line in lines) or not any(_CELLS.search(line) for line in lines):
        return None
    drawn = [_cells(line) for line in lines if _CELLS.search(line) and not _RULE.fullmatch(line)]
    if not drawn or len(drawn[0]) < 2:
        return None
    header = drawn[0]
    return [dict(zip(header, row, strict=True)) for row in drawn[1:] if len(row) == len(header)]


def _cells(line: str) -> list[str]:
    stripped = line.strip()
    inner = stripped[1:] if _CELLS.match(stripped) else stripped
    inner = inner[:-1] if inner and _CELLS.match(inner[-1]) else inner
    return [_unmarked(cell) for cell in _CELLS.split(inner)]


def _unmarked(cell: str) -> str:
    """A cell without Markdown's emphasis and code marks."""
    cell = cell.strip()
    for mark in ("**", "`", "*"):
        if len(cell) > 2 * len(mark) and cell.startswith(mark) and cell.endswith(mark):
            cell = cell[len(mark) : -len(mark)]
    return cell
