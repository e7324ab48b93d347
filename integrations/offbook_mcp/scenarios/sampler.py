"""Draws arguments for tools from schemas and from explored values. Sources that worked are drawn more often."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from offbook_mcp.tools.schemas import checker, simplified
from offbook_mcp.tools.tool import Schema
from offbook_mcp.tools.toolset import ModelTool

from .harvest import Leaf, Scalar, is_dated, words_of
from .slots import Slot, is_of_type, properties_of, slot_of

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
_OPEN = {"words", "quoted", "listed", "default", "paths", "here", "revisions", "patterns", "pattern", "phrases"}
"""Kinds of suggestions that may be wrong; values from any place are tried as well."""
_CONSTANT = re.compile(r"true|false|null|none", re.IGNORECASE)
_FIGURE = re.compile(r"-?\d+(\.\d+)?")
_DEEPEST = 4
_TRIES = 12
_RESTRICTS = {"enum", "format", "pattern"}
_OPTIONAL = 0.25
_OPTIONAL_ONLY = 0.5


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


class ArgumentSampler:
    """Draws calls of tools. `learn` reports which calls worked; `add` provides values from results."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.places: dict[str, dict[Scalar, Leaf]] = {}
        self._records: dict[tuple[str, str], list[Leaf]] = {}
        self._tried: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._worked: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._slots: dict[str, Slot] = {}
        self._variants: dict[str, list[Schema]] = {}
        self._accepts: dict[str, Callable[[object], bool]] = {}

    def add(self, leaves: Iterable[Leaf]) -> None:
        """Add values from a tool's result."""
        for leaf in leaves:
            if isinstance(leaf.value, str) and (_no_name(leaf) or is_dated(leaf.value)):
                continue
            values = self.places.setdefault(leaf.place, {})
            if len(values) < 200:
                values.setdefault(leaf.value, leaf)
            if leaf.record:
                self._records.setdefault((leaf.place.split(":")[0], leaf.record), []).append(leaf)

    def learn(self, draft: DraftCall, worked: bool) -> None:
        """Report whether a drawn call worked, which changes the weights of its sources."""
        for key in {(pick.slot.key, pick.source) for pick in draft.picks}:
            self._tried[key] += 1
            self._worked[key] += worked

    def worked(self, slot: Slot, source: str) -> int:
        """How often this source has worked for this slot."""
        return self._worked[slot.key, source]

    def draw(self, tool: ModelTool, near: tuple[Leaf, ...] = ()) -> DraftCall | None:
        """Draw a call of the tool that its schema accepts; None if no such call is known.

        `near` has values of another call in the same task, which are preferred where they fit.
        """
        if tool.name not in self._variants:
            self._variants[tool.name] = variants(tool)
            self._accepts[tool.name] = checker(tool.tool.input_schema, frozenset(tool.bound))
        for _ in range(_TRIES):
            drawing = _Drawing(self, tool, near)
            try:
                arguments = drawing.object(self.rng.choice(self._variants[tool.name]), "", 0)
            except _NoValueError:
                continue
            if self._accepts[tool.name](arguments):
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

    def record(self, names: Mapping[str, tuple[str, ...]]) -> dict[str, list[Leaf]] | None:
        """A JSON object from a result that has all of these properties (at least two), as values by name; None if none."""
        fitting: list[dict[str, list[Leaf]]] = []
        for leaves in self._records.values():
            matches = {
                name: [leaf for leaf in leaves if affinity(words, leaf.words) and isinstance(leaf.value, str)]
                for name, words in names.items()
            }
            if all(matches.values()) and len(matches) > 1:
                fitting.append(matches)
        return self.rng.choice(fitting) if fitting else None

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


def variants(tool: ModelTool) -> list[Schema]:
    """The schemas of the arguments, with examples: one for each option if the tool's own schema is a union, else the only one."""
    root = tool.tool.input_schema
    key = next((name for name in ("oneOf", "anyOf") if isinstance(root.get(name), list)), None)
    if key is None:
        return [simplified(root, examples=True).parameters]
    rest: Schema = {name: value for name, value in root.items() if name != key}
    parts = cast(list[object], rest.get("allOf") or [])
    options = [cast(Schema, option) for option in cast(list[object], root[key]) if isinstance(option, dict)]
    joined = [{**rest, "allOf": [*parts, option]} for option in options] or [root]
    return [simplified(schema, examples=True).parameters for schema in joined]


class _NoValueError(Exception):
    """No value is known for a slot."""


@dataclass
class _Drawing:
    sampler: ArgumentSampler
    tool: ModelTool
    near: tuple[Leaf, ...]
    picks: list[Pick] = field(default_factory=list[Pick])

    def object(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        listed = list(properties_of(schema))
        if not path:
            offered = cast(Schema, self.tool.parameters.get("properties") or {})
            listed = [item for item in listed if item[0] in offered]
        elif not listed and isinstance(schema.get("additionalProperties"), dict):
            return self.map(schema, path, depth)
        free = not any(required for _, _, required in listed)
        properties = [item for item in listed if item[2] or self._wanted(item[1], depth, free)]
        known = self._record(properties, path) if depth else {}
        drawn: dict[str, object] = {}
        for name, item, _ in properties:
            inner = f"{path}.{name}".lstrip(".")
            drawn[name] = known[name] if name in known else self.value(item, inner, depth + 1)
        return drawn

    def map(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        """An object whose keys are values too, such as `{"bolt": 40}`."""
        least = schema.get("minProperties")
        count = max(least if isinstance(least, int) else 1, self.sampler.rng.choice([1, 1, 2]))
        keys = {str(self.scalar(self.sampler.slot(self.tool, f"{path}{{}}", {"type": "string"}))) for _ in range(count)}
        return {
            key: self.value(cast(Schema, schema["additionalProperties"]), f"{path}.*", depth + 1)
            for key in sorted(keys)
        }

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
        return self.scalar(self.sampler.slot(self.tool, path, schema))

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

    def scalar(self, slot: Slot) -> Scalar:
        pick = self._near(slot) or self._drawn(slot)
        self.picks.append(pick)
        return pick.value

    def _near(self, slot: Slot) -> Pick | None:
        matching = [(affinity(slot.words, leaf.words), leaf) for leaf in self.near if fitting(slot, leaf) is not None]
        best = max((closeness for closeness, _ in matching), default=0)
        if not best or slot.closed:
            return None
        leaf = self.sampler.rng.choice([leaf for closeness, leaf in matching if closeness == best])
        return self._pick(slot, leaf.place, leaf)

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

    def _record(self, properties: list[tuple[str, Schema, bool]], path: str) -> dict[str, object]:
        """Half of the time, take the values of all properties from one JSON object of a result, since they belong together."""
        simple = {
            name: property_schema
            for name, property_schema, _ in properties
            if _is_text(property_schema) or _is_texts(property_schema)
        }
        if len(simple) < 2 or len(simple) < len(properties) or self.sampler.rng.random() < 0.5:
            return {}
        parents = words_of(path.replace("[]", "").replace(".", " "))
        record = self.sampler.record({name: (*parents, *words_of(name)) for name in simple})
        if record is None:
            return {}
        values: dict[str, object] = {}
        for name, property_schema in simple.items():
            leaf = self.sampler.rng.choice(record[name])
            inner = f"{path}.{name}" + ("[]" if _is_texts(property_schema) else "")
            schema = cast(Schema, property_schema.get("items")) if _is_texts(property_schema) else property_schema
            slot = self.sampler.slot(self.tool, inner, schema)
            self.picks.append(Pick(slot, f"record of {leaf.place}", leaf.value, leaf))
            values[name] = [leaf.value] if _is_texts(property_schema) else leaf.value
        return values


def _is_text(schema: Schema) -> bool:
    return schema.get("type") == "string" and "enum" not in schema


def _is_texts(schema: Schema) -> bool:
    items = schema.get("items")
    return schema.get("type") == "array" and isinstance(items, dict) and _is_text(cast(Schema, items))
