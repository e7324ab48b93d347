"""Slots: the scalar values in a tool's arguments, with the values that schemas and names suggest for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from offbook.base.text import word_list
from offbook_mcp.tools.schemas import checker
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .harvest import LONGEST_VALUE, Scalar, usable_value, values_for, words_of

ZONES = word_list(
    """Europe/London Europe/Paris Europe/Berlin Europe/Madrid Europe/Rome Europe/Athens Europe/Helsinki Europe/Istanbul
    Europe/Moscow Europe/Lisbon Europe/Warsaw Africa/Cairo Africa/Lagos Africa/Nairobi Africa/Johannesburg Asia/Dubai
    Asia/Karachi Asia/Kolkata Asia/Kathmandu Asia/Dhaka Asia/Bangkok Asia/Jakarta Asia/Shanghai Asia/Singapore
    Asia/Tokyo Asia/Seoul Asia/Tehran Asia/Manila Australia/Perth Australia/Adelaide Australia/Sydney Pacific/Auckland
    Pacific/Honolulu America/New_York America/Chicago America/Denver America/Los_Angeles America/Toronto
    America/Bogota America/Sao_Paulo America/Mexico_City America/Halifax"""
)
"""Common time zones that cover the UTC offsets in daily use."""
_WORDS = word_list(
    """amber basil cedar delta ember fern garnet harbor indigo juniper kestrel lilac maple nectar onyx pearl quartz raven
    saffron thistle umber violet willow yarrow zephyr"""
)
_PHRASES = [
    "water the plants",
    "call the plumber",
    "the blue door is open",
    "tea at four",
    "two red apples",
    "meet at the station",
    "bring a warm coat",
    "the meeting moved to Friday",
    "buy bread and milk",
    "the report is ready",
    "train leaves at noon",
    "paint the fence green",
]
_TIMES = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in (0, 15, 30, 45)]
_DATES = [f"2026-{month:02}-{day:02}" for month in range(1, 13) for day in (3, 14, 25)]
_COUNTRIES = ["France", "Japan", "Brazil", "Kenya", "Canada", "India", "Norway", "Peru"]
_CITIES = ["Paris", "Tokyo", "Nairobi", "Toronto", "Oslo", "Lima", "Chicago", "Madrid"]

_EXPRESSIONS = [f"{one} {sign} {other}" for one in (12, 45, 7, 130) for sign in "+*-" for other in (3, 8, 25)]

_CLOSED_MEANINGS = frozenset(
    [
        "time zones",
        "moments",
        "dates",
        "times",
        "addresses",
        "URLs",
        "countries",
        "currencies",
        "languages",
        "units",
        "expressions",
        "cities",
    ]
)
"""Kinds of values for which a common word is nonsense that a lenient server takes all the same."""
_MEANINGS: tuple[tuple[frozenset[str], tuple[str, list[str]]], ...] = (
    (frozenset(["timezone", "zone", "tz"]), ("time zones", list(ZONES))),
    (
        frozenset(["timestamp", "datetime"]),
        ("moments", [f"{date}T{time}:00" for date in _DATES for time in ("09:30", "18:00")]),
    ),
    (frozenset(["date", "day", "since", "until"]), ("dates", _DATES)),
    (frozenset(["time", "hour"]), ("times", _TIMES)),
    (frozenset(["email", "mail"]), ("addresses", [f"{word}@example.com" for word in _WORDS])),
    (frozenset(["url", "uri", "link"]), ("URLs", [f"https://example.com/{word}" for word in _WORDS])),
    (frozenset(["country"]), ("countries", _COUNTRIES)),
    (frozenset(["city", "location", "place"]), ("cities", _CITIES)),
    (frozenset(["unit"]), ("units", ["km", "m", "cm", "mm"])),
    (frozenset(["expression", "formula", "equation"]), ("expressions", _EXPRESSIONS)),
    (frozenset(["currency"]), ("currencies", ["EUR", "USD", "GBP", "JPY", "CHF", "INR"])),
    (frozenset(["language", "lang", "locale"]), ("languages", ["en", "fr", "de", "ja", "es", "pt"])),
    (
        frozenset(["path", "file", "filename", "directory", "folder", "dir"]),
        ("paths", [f"{word}.txt" for word in _WORDS]),
    ),
    (
        frozenset(["pattern", "glob"]),
        ("patterns", ["*", "**/*", "*.txt", "**/*.txt", "**/*.md", "**/*.py", "**/*.json"]),
    ),
    (
        frozenset(
            ["text", "message", "content", "body", "note", "comment", "observation", "description", "input", "title"]
        ),
        ("phrases", _PHRASES),
    ),
    (frozenset(["branch", "revision", "ref", "commit", "target"]), ("revisions", ["main", "master", "HEAD", "HEAD~1"])),
)
_FORMATS = {
    "date": ("dates", _DATES),
    "time": ("times", [f"{time}:00Z" for time in _TIMES]),
    "date-time": ("moments", [f"{date}T09:30:00Z" for date in _DATES]),
    "email": ("addresses", [f"{word}@example.com" for word in _WORDS]),
    "uri": ("URLs", [f"https://example.com/{word}" for word in _WORDS]),
    "ipv4": ("IP addresses", [f"192.0.2.{number}" for number in range(1, 30)]),
    "uuid": ("UUIDs", [f"00000000-0000-4000-8000-{number:012}" for number in range(1, 30)]),
}
_TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float)}
_DEGREES = re.compile(r"weather|temperature|forecast", re.IGNORECASE)
_QUOTED = re.compile(r"""(?<!\w)['"`]([^'"`\n]{1,40})['"`](?!\w)""")


@dataclass(frozen=True)
class Slot:
    """One scalar of a tool's arguments, at a `path` such as `entities[].name`.

    `suggestions` has the values that the schema and the names suggest, by kind of suggestion. A `closed` slot accepts no others.
    """

    tool: str
    path: str
    kind: str
    words: tuple[str, ...]
    suggestions: dict[str, list[Scalar]] = field(hash=False)
    closed: bool = False
    writes: bool = False
    accepts: Callable[[object], bool] = field(default=lambda value: True, compare=False, repr=False)

    @property
    def argument(self) -> str:
        """The top-level argument that contains the slot."""
        return re.split(r"[.\[{]", self.path, maxsplit=1)[0]

    @property
    def key(self) -> str:
        """Identifies the slot among all tools."""
        return f"{self.tool}.{self.path}"


def slot_of(tool: ModelTool, path: str, schema: Schema) -> Slot:
    """Build the slot for a scalar schema at `path` of the tool's arguments. It has only values that the schema accepts."""
    kind = str(schema.get("type", "string"))
    words = tuple(word for part in re.split(r"[.\[\]{}]+", path) for word in words_of(part))
    accepts = checker(schema)
    closed = "enum" in schema or kind == "boolean"
    if isinstance(enum := schema.get("enum"), list):
        suggestions = {
            "enum": [value for item in cast(list[object], enum) if (value := usable_value(item)) is not None]
        }
    elif kind == "boolean":
        suggestions: dict[str, list[Scalar]] = {"boolean": [True, False]}
    else:
        suggestions = _suggested(tool, path, schema, kind)
    accepted = {source: [value for value in values if accepts(value)] for source, values in suggestions.items()}
    suggestions = {source: values for source, values in accepted.items() if values}
    return Slot(tool.name, path, kind, words, suggestions, closed, tool.tool.kind is not ToolKind.READ, accepts)


def _suggested(tool: ModelTool, path: str, schema: Schema, kind: str) -> dict[str, list[Scalar]]:
    about = str(schema.get("description", ""))
    name = re.sub(r"\[\]|\{\}", "", path).rpartition(".")[2]
    suggestions: dict[str, list[Scalar]] = {}
    if examples := _values(cast(list[object], schema.get("examples") or []), kind):
        suggestions["examples"] = examples
    if default := _values([schema.get("default")], kind):
        suggestions["default"] = default
    if kind in ("integer", "number"):
        return suggestions | {"numbers": _numbers(schema, kind)}
    if quoted := _values([text for text in _QUOTED.findall(about) if not text.endswith((".", ":"))], kind):
        suggestions["quoted"] = quoted
    if listed := _values(values_for(name, about, tool.tool.description), kind):
        suggestions["listed"] = listed
    return suggestions | _meant(tool, name, schema)


def _meant(tool: ModelTool, name: str, schema: Schema) -> dict[str, list[Scalar]]:
    """The texts that a format or a name suggests. Where a name means nothing known, they are common words."""
    meaning, values = _FORMATS.get(str(schema.get("format"))) or meaning_of(words_of(name)) or ("words", [])
    meant: dict[str, list[Scalar]] = {meaning: list(values)}
    if meaning == "units" and _DEGREES.search(f"{tool.name} {tool.tool.description} {name}"):
        meant[meaning] = ["celsius", "fahrenheit"]
    if meaning == "paths":
        meant["here"] = ["."]
        meant[meaning] = list(_WORDS) if {"directory", "folder", "dir"} & set(words_of(tool.name)) else meant[meaning]
    return meant if meaning in _CLOSED_MEANINGS else meant | {"words": _words(schema)}


def _words(schema: Schema) -> list[Scalar]:
    """Common words of the length that the schema wants."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if isinstance(least, int) else 1
    most = most if isinstance(most, int) else LONGEST_VALUE
    if any(least <= len(word) <= most for word in _WORDS):
        return list(_WORDS)
    return [(f"{word} " * least)[: max(least, min(most, len(word)))].strip().ljust(least, "x") for word in _WORDS]


def meaning_of(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The kind of values that a name means by its last word, and examples; None if unknown."""
    last = "timezone" if words[-2:] == ("time", "zone") else "".join(words[-1:])
    return next((values for names, values in _MEANINGS if last in names), None)


def _numbers(schema: Schema, kind: str) -> list[Scalar]:
    """Up to 100 numbers within the bounds; with decimals if few whole numbers lie there."""
    lowest = max(_keyword_values(schema, "minimum", "exclusiveMinimum"), default=None)
    highest = min(_keyword_values(schema, "maximum", "exclusiveMaximum"), default=None)
    steps = _keyword_values(schema, "multipleOf")
    step = steps[0] if steps and steps[0] > 0 else 1.0
    low = lowest if lowest is not None else 1.0 if highest is None or highest >= 1 else highest - 19 * step
    high = highest if highest is not None else low + 20 * step
    first = math.ceil(low / step)
    values = [step * number for number in range(first, first + 101) if low <= step * number <= high]
    if kind == "number" and not steps and len(values) < 10:
        values += [round(low + (high - low) * part / 20, 6) for part in range(1, 20)]
    return [int(value) if value.is_integer() else value for value in values]


def _keyword_values(schema: Schema, *names: str) -> list[float]:
    values = (schema.get(name) for name in names)
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _values(values: Sequence[object], kind: str) -> list[Scalar]:
    """Those of the values that can be arguments of this type, each once."""
    usable = (usable_value(value) for value in values if is_of_type(value, kind))
    return list(dict.fromkeys(value for value in usable if value is not None))


def is_of_type(value: object, kind: str) -> bool:
    """Whether a value has this type of JSON Schema: "string", "integer" or "number"."""
    return isinstance(value, _TYPES.get(kind, ())) and not isinstance(value, bool)


def properties_of(schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the name, the schema and whether it is required, for every property of an object schema."""
    properties = schema.get("properties")
    required = cast(list[object], schema.get("required") or [])
    for name, property_schema in cast(dict[str, object], properties if isinstance(properties, dict) else {}).items():
        yield name, cast(Schema, property_schema) if isinstance(property_schema, dict) else {}, name in required
