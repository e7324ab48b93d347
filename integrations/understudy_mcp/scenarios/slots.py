"""Slots: the scalar values in a tool's arguments, with the values that schemas and names suggest for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..tools.tool import Schema, ToolKind
from ..tools.toolset import ModelTool
from .harvest import Scalar, usable_value, words_of
from .listed_values import values_for
from .schema_examples import examples_of

ZONES = [
    "Europe/London",
    "Europe/Paris",
    "Europe/Berlin",
    "Europe/Madrid",
    "Europe/Rome",
    "Europe/Athens",
    "Europe/Helsinki",
    "Europe/Istanbul",
    "Europe/Moscow",
    "Europe/Lisbon",
    "Europe/Warsaw",
    "Africa/Cairo",
    "Africa/Lagos",
    "Africa/Nairobi",
    "Africa/Johannesburg",
    "Asia/Dubai",
    "Asia/Karachi",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Asia/Dhaka",
    "Asia/Bangkok",
    "Asia/Jakarta",
    "Asia/Shanghai",
    "Asia/Singapore",
    "Asia/Tokyo",
    "Asia/Seoul",
    "Asia/Tehran",
    "Asia/Manila",
    "Australia/Perth",
    "Australia/Adelaide",
    "Australia/Sydney",
    "Pacific/Auckland",
    "Pacific/Honolulu",
    "America/New_York",
    "America/Chicago",
    "America/Denver",
    "America/Los_Angeles",
    "America/Toronto",
    "America/Bogota",
    "America/Sao_Paulo",
    "America/Mexico_City",
    "America/Halifax",
]
"""Common time zones that cover the UTC offsets in daily use."""
_WORDS = [
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "fern",
    "garnet",
    "harbor",
    "indigo",
    "juniper",
    "kestrel",
    "lilac",
    "maple",
    "nectar",
    "onyx",
    "pearl",
    "quartz",
    "raven",
    "saffron",
    "thistle",
    "umber",
    "violet",
    "willow",
    "yarrow",
    "zephyr",
]
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
_QUOTED = re.compile(r"""(?<!\w)['"`]([^'"`\n]{1,40})['"`](?!\w)""")


@dataclass(frozen=True)
class Slot:
    """One scalar of a tool's arguments, at a `path` such as `entities[].name`.

    `told` has the values that the schema and the names suggest, by kind of suggestion. A `closed` slot accepts no others.
    """

    tool: str
    path: str
    kind: str
    words: tuple[str, ...]
    told: dict[str, list[Scalar]] = field(hash=False)
    closed: bool = False
    writes: bool = False

    @property
    def argument(self) -> str:
        """The top-level argument that contains the slot."""
        return self.path.split(".")[0].removesuffix("[]")

    @property
    def key(self) -> str:
        """Identifies the slot among all tools."""
        return f"{self.tool}.{self.path}"


def slot_of(tool: ModelTool, path: str, schema: Schema) -> Slot:
    """Build the slot for a scalar schema at `path` of the tool's arguments."""
    kind = str(schema.get("type", "string"))
    words = tuple(word for part in path.replace("[]", "").split(".") for word in words_of(part))
    about = str(schema.get("description", ""))
    name = path.replace("[]", "").rpartition(".")[2]
    if isinstance(enum := schema.get("enum"), list):
        values = [
            value for value_in_enum in cast(list[object], enum) if (value := usable_value(value_in_enum)) is not None
        ]
        return Slot(tool.name, path, kind, words, {"enum": values}, closed=True)
    if kind == "boolean":
        return Slot(tool.name, path, kind, words, {"boolean": [True, False]}, closed=True)
    told: dict[str, list[Scalar]] = {}
    if examples := _values(examples_of(tool.tool.input_schema, path), kind):
        told["examples"] = examples
    if default := _values([schema.get("default")], kind):
        told["default"] = default
    if kind in ("integer", "number"):
        return Slot(tool.name, path, kind, words, told | {"numbers": _numbers(schema, kind)})
    if isinstance(form := schema.get("format"), str) and form in _FORMATS:
        told[_FORMATS[form][0]] = list(_FORMATS[form][1])
    elif meaning := meaning_of(words_of(name)):
        told[meaning[0]] = list(meaning[1])
        if meaning[0] == "paths":
            told["here"] = ["."]
            if {"directory", "folder", "dir"} & set(words_of(tool.name)):
                told["paths"] = list(_WORDS)
    if quoted := _values([text for text in _QUOTED.findall(about) if not text.endswith((".", ":"))], kind):
        told["quoted"] = quoted
    if listed := _values(values_for(name, about, tool.tool.description), kind):
        told["listed"] = listed
    told["words"] = list(_WORDS)
    return Slot(tool.name, path, kind, words, told, writes=tool.tool.kind is not ToolKind.READ)


def meaning_of(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The kind of values that a name means by its last word, and examples; None if unknown."""
    last = "timezone" if words[-2:] == ("time", "zone") else "".join(words[-1:])
    return next((values for names, values in _MEANINGS if last in names), None)


def _numbers(schema: Schema, kind: str) -> list[Scalar]:
    low = _bound(schema, "minimum", "exclusiveMinimum", 1.0)
    high = _bound(schema, "maximum", "exclusiveMaximum", None)
    start = int(low if low is not None else 1)
    stop = int(min(high, start + 99)) if high is not None else start + 19
    values: list[Scalar] = [number for number in range(start, stop + 1) if low is None or number >= low]
    step = schema.get("multipleOf")
    if isinstance(step, int) and step > 1:
        values = [
            value
            for value in range(start, stop + 20 * step + 1)
            if value % step == 0 and (high is None or value <= high)
        ]
    return values or ([float(low or 0)] if kind == "number" else [start])


def _bound(schema: Schema, name: str, exclusive: str, otherwise: float | None) -> float | None:
    if isinstance(value := schema.get(name), int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value := schema.get(exclusive), int | float) and not isinstance(value, bool):
        return float(value) + (1 if name == "minimum" else -1)
    return otherwise


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
