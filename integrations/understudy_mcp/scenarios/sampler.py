"""Draws arguments for tools from schemas and from explored values. Sources that worked are drawn more often."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from ..tools.tool import Schema
from ..tools.toolset import ModelTool
from .harvest import Leaf, Scalar, words_of
from .moments import is_dated
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
_OPEN = {"words", "quoted", "listed", "default", "paths", "here", "revisions", "patterns", "phrases", "cities"}
"""Kinds of suggestions that may be wrong; values from any place are tried as well."""
_CONSTANT = re.compile(r"true|false|null|none", re.IGNORECASE)
_FIGURE = re.compile(r"-?\d+(\.\d+)?")
_DEEPEST = 4
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

    def draw(self, tool: ModelTool, near: tuple[Leaf, ...] = ()) -> DraftCall:
        """Draw a call of the tool. `near` has values of another call in the same task, which are preferred where they fit."""
        drawing = _Drawing(self, tool, near)
        arguments = drawing.object(tool.parameters, "", 0)
        return DraftCall(tool, arguments, tuple(drawing.picks))

    def slot(self, tool: ModelTool, path: str, schema: Schema) -> Slot:
        """The slot for a path of the tool's arguments; cached."""
        key = f"{tool.name}.{path}"
        if key not in self._slots:
            self._slots[key] = slot_of(tool, path, schema)
        return self._slots[key]

    def sources(self, slot: Slot) -> dict[str, float]:
        """The weights of the possible sources for a slot."""
        weights = {source: _PRIOR.get(source, _MEANING) for source, values in slot.told.items() if values}
        if slot.closed:
            return weights
        is_open = set(slot.told) <= _OPEN
        others: list[str] = []
        for place, values in self.places.items():
            leaf = next(iter(values.values()))
            if fitting(slot, leaf) is None:
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
    """The value as the slot's type: `"40"` of a table for an integer is 40; None if it has another type."""
    if is_of_type(leaf.value, slot.kind):
        return leaf.value
    if isinstance(leaf.value, str) and slot.kind in ("integer", "number") and _FIGURE.fullmatch(leaf.value):
        number = float(leaf.value)
        return int(number) if number.is_integer() else number if slot.kind == "number" else None
    if slot.kind == "string" and isinstance(leaf.value, int) and not isinstance(leaf.value, bool):
        return str(leaf.value)
    return None


@dataclass
class _Drawing:
    """The drawing of one call, with the values picked so far."""

    sampler: ArgumentSampler
    tool: ModelTool
    near: tuple[Leaf, ...]
    picks: list[Pick] = field(default_factory=list[Pick])

    def object(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        listed = list(properties_of(schema))
        free = not any(required for _, _, required in listed)
        properties = [item for item in listed if item[2] or self._wanted(item[1], depth, free)]
        known = self._record(properties, path) if depth else {}
        drawn: dict[str, object] = {}
        for name, item, _ in properties:
            inner = f"{path}.{name}".lstrip(".")
            drawn[name] = known[name] if name in known else self.value(item, inner, depth + 1)
        return drawn

    def value(self, schema: Schema, path: str, depth: int) -> object:
        if isinstance(options := schema.get("anyOf"), list) and options:
            schema = cast(Schema, options[0])
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
        source = rng.choices(list(weights), list(weights.values()))[0]
        if source in slot.told:
            values = slot.told[source]
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
        known = schema.get("type") in ("boolean", "integer", "number") or "enum" in schema or "format" in schema
        usable = known or (free and schema.get("type") == "string")
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
