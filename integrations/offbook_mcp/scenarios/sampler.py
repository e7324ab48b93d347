"""Calls and plans of calls as they are drawn: arguments from schemas and from explored values, where sources that worked are drawn
more often."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from offbook_mcp.tools.schemas import checker, simplified
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool

from .harvest import Leaf, Scalar, is_dated
from .scenario import ReferenceCall
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
_OPEN = {"words", "quoted", "listed", "default", "paths", "here", "revisions", "patterns", "phrases"}
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
        listed = list(properties_of(schema))
        if not path:
            offered = cast(Schema, self.tool.parameters.get("properties") or {})
            listed = [item for item in listed if item[0] in offered]
        if path and not listed and isinstance(schema.get("additionalProperties"), dict):
            raise _NoValueError  # a map, whose keys are unknown
        free = not any(required for _, _, required in listed)
        properties = [item for item in listed if item[2] or self._wanted(item[1], depth, free)]
        drawn: dict[str, object] = {}
        for name, item, _ in properties:
            inner = f"{path}.{name}".lstrip(".")
            drawn[name] = self.value(item, inner, depth + 1)
        return drawn

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
