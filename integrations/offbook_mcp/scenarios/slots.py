"""Slots: the scalar values in a tool's arguments, with the values that schemas and names suggest for them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from rstr import Rstr
from rstr.xeger import STAR_PLUS_LIMIT

from offbook.base.schema_patterns import longest_text
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool
from offbook_mcp.tools.validity import checker

from .dates import dates_like
from .harvest import LONGEST_VALUE, Scalar, usable_value, words_of
from .listed_values import values_for

_STEP = re.compile(r"\[\]|[^.\[\]]+")
_LONGEST_MATCH = 10_000
"""Limit in characters of a text that a pattern describes."""
_MOST_SCHEMAS = 64
"""Limit on the schemas at one place of a path: references can be recursive."""


def examples_of(root: Schema, path: str) -> list[object]:
    """The examples for the argument at `path`, such as `entities[].name`: its own, and the parts of those around it.

    >>> examples_of({"properties": {"tags": {"examples": [["a", "b"]], "items": {"examples": ["c"]}}}}, "tags[]")
    ['a', 'b', 'c']
    """
    steps = _STEP.findall(path)
    schemas: list[object] = [root]
    examples: list[object] = []
    for depth in range(len(steps) + 1):
        alternatives = list(islice((one for schema in schemas for one in _alternatives(schema, root)), _MOST_SCHEMAS))
        for schema in alternatives:
            for example in _listed(schema.get("examples")):
                examples += _parts(example, steps[depth:])
        if depth < len(steps):
            schemas = [_inner(schema, steps[depth]) for schema in alternatives]
    return examples


def _alternatives(schema: object, root: Schema) -> Iterator[Schema]:
    """The schema, and those that it refers to or combines."""
    if not isinstance(schema, dict):
        return
    named = cast(Schema, schema)
    yield named
    others = [_referenced(named.get("$ref"), root)]
    for key in ("allOf", "anyOf", "oneOf"):
        others += _listed(named.get(key))
    for other in others:
        yield from _alternatives(other, root)


def _referenced(reference: object, root: Schema) -> object:
    """The schema at a JSON pointer such as `#/$defs/Parcel`; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node = cast(object, root)
    for part in reference[2:].split("/"):
        if not isinstance(node, dict):
            return None
        node = cast(Schema, node).get(part.replace("~1", "/").replace("~0", "~"))
    return node


def _inner(schema: Schema, step: str) -> object:
    if step == "[]":
        return schema.get("items")
    properties = schema.get("properties")
    return cast(Schema, properties).get(step) if isinstance(properties, dict) else None


def _parts(example: object, steps: list[str]) -> list[object]:
    """What an example has at the rest of a path."""
    parts = [example]
    for step in steps:
        if step == "[]":
            parts = [item for part in parts for item in _listed(part)]
        else:
            parts = [cast(Schema, part)[step] for part in parts if isinstance(part, dict) and step in part]
    return parts


def _listed(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []


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

_EXPRESSIONS = [f"{one} {sign} {other}" for one in (12, 45, 7, 130) for sign in "+*-" for other in (3, 8, 25)]

_CLOSED_MEANINGS = {
    "time zones",
    "moments",
    "dates",
    "times",
    "addresses",
    "URLs",
    "countries",
    "currencies",
    "languages",
} | {*("units", "expressions", "cities")}
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

    `told` has the values that the schema and the names suggest, by kind of suggestion. A `closed` slot accepts no others.
    """

    tool: str
    path: str
    kind: str
    words: tuple[str, ...]
    told: dict[str, list[Scalar]] = field(hash=False)
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
        told = {"enum": [value for item in cast(list[object], enum) if (value := usable_value(item)) is not None]}
    elif kind == "boolean":
        told: dict[str, list[Scalar]] = {"boolean": [True, False]}
    else:
        told = _suggested(tool, path, schema, kind)
    accepted = {source: [value for value in values if accepts(value)] for source, values in told.items()}
    told = {source: values for source, values in accepted.items() if values}
    return Slot(tool.name, path, kind, words, told, closed, tool.tool.kind is not ToolKind.READ, accepts)


def _suggested(tool: ModelTool, path: str, schema: Schema, kind: str) -> dict[str, list[Scalar]]:
    """The values that the schema, the descriptions and the names suggest, by kind of suggestion."""
    about = str(schema.get("description", ""))
    name = re.sub(r"\[\]|\{\}", "", path).rpartition(".")[2]
    told: dict[str, list[Scalar]] = {}
    if examples := _values(examples_of(tool.tool.input_schema, path), kind):
        told["examples"] = examples
    if default := _values([schema.get("default")], kind):
        told["default"] = default
    if kind in ("integer", "number"):
        return told | {"numbers": _numbers(schema, kind)}
    if quoted := _values([text for text in _QUOTED.findall(about) if not text.endswith((".", ":"))], kind):
        told["quoted"] = quoted
    if listed := _values(values_for(name, about, tool.tool.description), kind):
        told["listed"] = listed
    dates: list[Scalar] = [*dates_like([str(value) for value in (*examples, *quoted, *default)], about)]
    return told | ({"dates": dates} if dates else _meant(tool, path, name, schema))


def _meant(tool: ModelTool, path: str, name: str, schema: Schema) -> dict[str, list[Scalar]]:
    """The texts that a pattern, a format or a name suggests. Where a name means nothing known, they are common words."""
    meant: dict[str, list[Scalar]] = {}
    if isinstance(pattern := schema.get("pattern"), str):
        meant["pattern"] = _matching(pattern, f"{tool.name}.{path}")
    meaning, values = _FORMATS.get(str(schema.get("format"))) or meaning_of(words_of(name)) or ("words", [])
    meant[meaning] = list(values)
    if meaning == "units" and _DEGREES.search(f"{tool.name} {tool.tool.description} {name}"):
        meant[meaning] = ["celsius", "fahrenheit"]
    if meaning == "paths":
        meant["here"] = ["."]
        meant[meaning] = list(_WORDS) if {"directory", "folder", "dir"} & set(words_of(tool.name)) else meant[meaning]
    return meant if meaning in _CLOSED_MEANINGS else meant | {"words": _words(schema)}


def _matching(pattern: str, seed: str) -> list[Scalar]:
    """Some texts that match a regular expression; none for one that Python does not know."""
    made = Rstr(random.Random(seed))
    try:
        if longest_text(pattern, STAR_PLUS_LIMIT) > _LONGEST_MATCH:
            return []
        texts = [made.xeger(pattern) for _ in range(30)]
    except (re.error, ValueError, KeyError, OverflowError, RecursionError):
        return []
    return _values(texts, "string")


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
    lowest = max(_given(schema, "minimum", "exclusiveMinimum"), default=None)
    highest = min(_given(schema, "maximum", "exclusiveMaximum"), default=None)
    steps = _given(schema, "multipleOf")
    step = steps[0] if steps and steps[0] > 0 else 1.0
    low = lowest if lowest is not None else 1.0 if highest is None or highest >= 1 else highest - 19 * step
    high = highest if highest is not None else low + 20 * step
    first = math.ceil(low / step)
    values = [step * number for number in range(first, first + 101) if low <= step * number <= high]
    if kind == "number" and not steps and len(values) < 10:
        values += [round(low + (high - low) * part / 20, 6) for part in range(1, 20)]
    return [int(value) if value.is_integer() else value for value in values]


def _given(schema: Schema, *names: str) -> list[float]:
    """The numbers of these keywords."""
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
