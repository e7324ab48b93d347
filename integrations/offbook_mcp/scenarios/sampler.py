"""Slots, the scalar values in a tool's arguments; and calls and plans of calls as they are drawn: arguments from schemas and from explored values, where sources that worked are drawn
more often."""

from __future__ import annotations

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from offbook.base.text import word_list
from offbook_mcp.tools.schemas import checker, simplified
from offbook_mcp.tools.tool import Schema, ToolKind, properties_of
from offbook_mcp.tools.toolset import ModelTool

from .harvest import LONGEST_VALUE, Leaf, Scalar, is_dated, usable_value, values_for, words_of
from .scenario import ReferenceCall

_PRIOR = {
    "enum": 9.0,
    "boolean": 9.0,
    "numbers": 5.0,
    "examples": 6.0,
    "listed": 6.0,
    "quoted": 4.0,
    "default": 2.0,
    "words": 1.5,
}
_MEANING, _MATCHING, _OTHERS = 5.0, 6.0, 3.0
_OTHERS_OF_WRITERS = 0.5
_OPEN = {"words", "quoted", "listed", "default", "paths", "here", "revisions", "patterns", "phrases"}
"""Kinds of suggestions that may be wrong; values from any place are tried as well."""
_CONSTANT = re.compile(r"true|false|null|none", re.IGNORECASE)
_FIGURE = re.compile(r"-?\d+(\.\d+)?")
_DEEPEST = 4
_TRIES = 12
_RESTRICTS = {"enum", "format", "pattern"}
_OPTIONAL = 0.25
_OPTIONAL_ONLY = 0.5


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
    form = str(schema.get("format")).replace("-", "")
    known = _FORMATS.get(form) or meaning_of((form,)) or meaning_of(words_of(name))
    meaning, values = known or ("words", list[str]())
    meant: dict[str, list[Scalar]] = {meaning: list(values)}
    if meaning == "units" and _DEGREES.search(f"{tool.name} {tool.tool.description} {name}"):
        meant[meaning] = ["celsius", "fahrenheit"]
    if meaning == "paths":
        meant["here"] = ["."]
        meant[meaning] = list(_WORDS) if {"directory", "folder", "dir"} & set(words_of(tool.name)) else meant[meaning]
    return meant | {"words": _words(schema)} if meaning in _OPEN else meant


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


@dataclass(frozen=True)
class Pick:
    """The value drawn for one slot, and its source."""

    slot: Slot
    source: str
    value: Scalar
    leaf: Leaf | None = None


@dataclass(frozen=True)
class DraftCall:
    """A drawn call, not yet tried."""

    tool: ModelTool
    arguments: Mapping[str, object] = field(hash=False)
    picks: tuple[Pick, ...] = field(hash=False)

    @property
    def calls(self) -> tuple[ReferenceCall, ...]:
        """The call in the form of a scenario."""
        return (ReferenceCall(tool=self.tool.name, arguments=self.arguments),)


@dataclass(frozen=True)
class ValueLink:
    """An argument that the task does not contain, but the previous result does.

    `words` describe the value in that result. `first` means that it is the first of several such values.
    """

    pick: Pick
    words: tuple[str, ...]
    first: bool


@dataclass(frozen=True)
class Plan:
    """The calls of a task, in order. They are independent, unless the last has a `link` to the one before it."""

    drafts: tuple[DraftCall, ...] = field(hash=False)
    link: ValueLink | None = field(default=None, hash=False)

    @property
    def calls(self) -> tuple[ReferenceCall, ...]:
        """The calls in the form of a scenario."""
        return tuple(call for draft in self.drafts for call in draft.calls)

    @property
    def recipe(self) -> str:
        """How the calls depend on each other."""
        return "flow" if self.link is not None else "several" if len(self.drafts) > 1 else "single"

    @property
    def writes(self) -> bool:
        """Whether a call may change something."""
        return any(draft.tool.tool.kind is not ToolKind.READ for draft in self.drafts)

    @property
    def difficulty(self) -> int:
        """1: one value. 2: several values. 3: two calls, or nested values. 4: calls that depend on each other. 5: three."""
        if len(self.drafts) > 1:
            return 5 if len(self.drafts) > 2 else 3 if self.link is None else 4
        values = sum(len(draft.picks) for draft in self.drafts)
        return 1 if values < 2 else 2 if values < 5 else 3


class ArgumentSampler:
    """Draws calls of tools. `learn` reports which calls worked; `add` provides values from results."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.places: dict[str, dict[Scalar, Leaf]] = {}
        self._tried: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._worked: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._slots: dict[str, Slot] = {}
        self._schemas: dict[str, tuple[Schema, Callable[[object], bool]]] = {}

    def add(self, leaves: Iterable[Leaf]) -> None:
        """Add values from a tool's result."""
        for leaf in leaves:
            if isinstance(leaf.value, str) and (_no_name(leaf) or is_dated(leaf.value)):
                continue
            values = self.places.setdefault(leaf.place, {})
            if len(values) < 200:
                values.setdefault(leaf.value, leaf)

    def learn(self, draft: DraftCall, worked: bool) -> None:
        """Report whether a drawn call worked, which changes the weights of its sources."""
        for key in {(pick.slot.key, pick.source) for pick in draft.picks}:
            self._tried[key] += 1
            self._worked[key] += worked

    def worked(self, slot: Slot, source: str) -> int:
        """How often this source has worked for this slot."""
        return self._worked[slot.key, source]

    def draw(self, tool: ModelTool) -> DraftCall | None:
        """Draw a call of the tool that its schema accepts; None if no such call is known."""
        if tool.name not in self._schemas:
            schema = tool.tool.input_schema
            accepts = checker(schema, frozenset(tool.bound))
            self._schemas[tool.name] = simplified(schema, examples=True), accepts
        parameters, accepts = self._schemas[tool.name]
        for _ in range(_TRIES):
            drawing = _Drawing(self, tool)
            try:
                arguments = drawing.object(parameters, "", 0)
            except _NoValueError:
                continue
            if accepts(arguments):
                return DraftCall(tool, arguments, tuple(drawing.picks))
        return None

    def slot(self, tool: ModelTool, path: str, schema: Schema) -> Slot:
        """The slot for a path of the tool's arguments; cached."""
        key = f"{tool.name}.{path} {json.dumps(schema, sort_keys=True, default=str)}"
        if key not in self._slots:
            self._slots[key] = slot_of(tool, path, schema)
        return self._slots[key]

    def sources(self, slot: Slot) -> dict[str, float]:
        """The weights of the possible sources for a slot."""
        weights = {source: _PRIOR.get(source, _MEANING) for source, values in slot.suggestions.items() if values}
        if slot.closed:
            return weights
        is_open = set(slot.suggestions) <= _OPEN
        others: list[str] = []
        for place, values in self.places.items():
            leaf = next((leaf for leaf in values.values() if fitting(slot, leaf) is not None), None)
            if leaf is None:
                continue
            closeness = affinity(slot.words, leaf.words)
            if closeness:
                weights[place] = _MATCHING * closeness
            elif is_open and slot.kind == "string" and isinstance(leaf.value, str):
                others.append(place)
        share = _OTHERS_OF_WRITERS if slot.writes else _OTHERS
        weights |= {place: share / len(others) for place in others}
        return {source: prior * self._rate(slot.key, source) for source, prior in weights.items()}

    def _rate(self, key: str, source: str) -> float:
        """Factor for a source's weight: its success rate with a prior of one half, squared."""
        tried, worked = self._tried[key, source], self._worked[key, source]
        return ((worked + 0.5) / (tried + 1)) ** 2


def _no_name(leaf: Leaf) -> bool:
    """Whether a text is no name: a constant such as `true`, or a number in running text."""
    text = str(leaf.value)
    in_text = leaf.place.endswith((":", "lines"))
    return bool(_CONSTANT.fullmatch(text) or (in_text and _FIGURE.fullmatch(text)))


def affinity(slot: tuple[str, ...], leaf: tuple[str, ...]) -> int:
    """How many words of a slot and of a value agree; 0 if the last words differ."""
    if not slot or not leaf or slot[-1] != leaf[-1]:
        return 0
    return 1 + len(set(slot[:-1]) & set(leaf[:-1]))


def fitting(slot: Slot, leaf: Leaf) -> Scalar | None:
    """The value as the slot's type: `"40"` of a table is 40 for an integer; None if its schema accepts neither."""
    value = _converted(slot.kind, leaf.value)
    return value if value is not None and slot.accepts(value) else None


def _converted(kind: str, value: Scalar) -> Scalar | None:
    if is_of_type(value, kind):
        return value
    if isinstance(value, str) and kind in ("integer", "number") and _FIGURE.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() else number if kind == "number" else None
    return str(value) if kind == "string" and isinstance(value, int) and not isinstance(value, bool) else None


class _NoValueError(Exception):
    """No value is known for a slot."""


@dataclass
class _Drawing:
    sampler: ArgumentSampler
    tool: ModelTool
    picks: list[Pick] = field(default_factory=list[Pick])

    def object(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        properties, required = properties_of(schema), cast(list[object], schema.get("required") or [])
        if not path:
            offered = properties_of(self.tool.parameters)
            properties = {name: item for name, item in properties.items() if name in offered}
        elif not properties and isinstance(schema.get("additionalProperties"), dict):
            raise _NoValueError  # a map, whose keys are unknown
        free = not any(name in required for name in properties)
        wanted = {
            name: item for name, item in properties.items() if name in required or self._wanted(item, depth, free)
        }
        return {name: self.value(item, f"{path}.{name}".lstrip("."), depth + 1) for name, item in wanted.items()}

    def value(self, schema: Schema, path: str, depth: int) -> object:
        if isinstance(options := schema.get("anyOf"), list) and options:
            rest: Schema = {key: value for key, value in schema.items() if key != "anyOf"}
            schema = {**rest, **cast(Schema, self.sampler.rng.choice(cast(list[object], options)))}
        kind = schema.get("type", "string")
        if depth > _DEEPEST:
            return [] if kind == "array" else {}
        if kind == "object":
            return self.object(schema, path, depth)
        if kind == "array":
            return self.array(schema, path, depth)
        pick = self._drawn(self.sampler.slot(self.tool, path, schema))
        self.picks.append(pick)
        return pick.value

    def array(self, schema: Schema, path: str, depth: int) -> list[object]:
        items = schema.get("items")
        least = schema.get("minItems")
        count = max(least if isinstance(least, int) else 1, self.sampler.rng.choice([1, 1, 1, 2]))
        drawn: list[object] = []
        for _ in range(min(count, 3)):
            value = self.value(cast(Schema, items) if isinstance(items, dict) else {}, f"{path}[]", depth)
            if value not in drawn:
                drawn.append(value)
        return drawn

    def _drawn(self, slot: Slot) -> Pick:
        rng = self.sampler.rng
        weights = self.sampler.sources(slot)
        if not weights:
            raise _NoValueError
        source = rng.choices(list(weights), list(weights.values()))[0]
        if source in slot.suggestions:
            values = slot.suggestions[source]
            taken = {pick.value for pick in self.picks}
            return Pick(slot, source, rng.choice([value for value in values if value not in taken] or values))
        leaves = list(self.sampler.places[source].values())
        chosen = {pick.value for pick in self.picks}
        leaves = [leaf for leaf in leaves if leaf.context & chosen] or leaves
        return self._pick(
            slot, source, rng.choice([leaf for leaf in leaves if fitting(slot, leaf) is not None] or leaves)
        )

    def _pick(self, slot: Slot, source: str, leaf: Leaf) -> Pick:
        value = fitting(slot, leaf)
        return Pick(slot, source, leaf.value if value is None else value, leaf)

    def _wanted(self, schema: Schema, depth: int, free: bool) -> bool:
        """Whether to draw an optional argument: rarely, and only if the schema restricts its values.

        More often, and also for plain strings, if the object has no required argument (`free`).
        """
        items = schema.get("items")
        one = cast(Schema, items) if schema.get("type") == "array" and isinstance(items, dict) else schema
        known = one.get("type") in ("boolean", "integer", "number") or not _RESTRICTS.isdisjoint(one)
        usable = known or (free and one.get("type") == "string")
        return usable and depth < 2 and self.sampler.rng.random() < (_OPTIONAL_ONLY if free else _OPTIONAL)
