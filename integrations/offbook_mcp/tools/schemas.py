"""Reduces a tool's JSON schema to what chat templates and providers support, and lists the changes.

A server may use all of JSON Schema. Every template renders and every provider accepts only types, properties, required,
items, enums, descriptions, defaults and simple bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from offbook.base.schema_patterns import SlowPatternError, pattern_time, with_timed_patterns
from offbook.base.text import word_list

from .tool import Schema

_KEPT = frozenset(
    word_list(
        """additionalProperties anyOf default description enum exclusiveMaximum exclusiveMinimum format items maxItems
    maxLength maximum minItems minLength minimum multipleOf pattern properties required type uniqueItems"""
    )
)
_NOISE = frozenset(
    ["$comment", "$defs", "$id", "$schema", "definitions", "deprecated", "examples", "readOnly", "title", "writeOnly"]
)
"""Keywords dropped without a note: they constrain nothing and cost tokens."""
_MAX_LEVELS = 6
"""Deepest level of a value. The template of the bundled policy refuses objects below it."""
_MAX_NODES = 1_000
"""Limit on the schemas after inlining: nested references can make a small schema huge."""


@dataclass(frozen=True)
class SimplifiedSchema:
    """A reduced object schema; `changes` has a line per change."""

    parameters: Schema
    changes: tuple[str, ...]


def simplified(schema: Schema, *, examples: bool = False) -> SimplifiedSchema:
    """Reduce a schema: inline references, drop null from unions, and remove unsupported keywords. `examples`: keep those, each
    value with also the parts of the examples around it.

    `{"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}` becomes `{"type": "string"}`.
    """
    work = _Simplification(schema, examples)
    parameters = work.simple(schema, "", ())
    properties = parameters.get("properties")
    parameters["type"] = "object"
    parameters["properties"] = properties if isinstance(properties, dict) else {}
    return SimplifiedSchema(parameters, tuple(work.changes))


@dataclass
class _Simplification:
    """The reduction of one schema: the root for references, the changes so far, and the number of schemas visited."""

    root: Schema
    examples: bool = False
    changes: list[str] = field(default_factory=list[str])
    nodes: int = 0

    def note_change(self, path: str, what: str) -> None:
        line = f"{path or 'the arguments'}: {what}"
        if line not in self.changes:
            self.changes.append(line)

    def simple(self, schema: object, path: str, inside: tuple[str, ...]) -> Schema:
        """Reduce the schema at `path`. `inside` lists the references being inlined around it, to detect recursion."""
        if not isinstance(schema, dict):
            if schema is not True:
                self.note_change(path, f"{schema!r} is not a schema, any value is allowed")
            return {}
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            self.note_change("", f"more than {_MAX_NODES:,} schemas after inlining, any value is allowed in the rest")
            return {}
        if path.count(".") + path.count("[]") >= _MAX_LEVELS:
            self.note_change(path, f"more than {_MAX_LEVELS} levels deep, any value is allowed")
            return {}
        schema, inside = self.flat(cast(Schema, schema), path, inside)
        simple: Schema = {}
        if self.examples and isinstance(examples := schema.get("examples"), list):
            schema = _handed_down(schema, cast(list[object], examples))
            simple["examples"] = examples
        for key, value in schema.items():
            if key in _KEPT:
                self.keep(simple, key, value, path, inside)
            elif key == "const":
                simple["enum"] = [value]
            elif key not in _NOISE:
                self.note_change(path, f"{key} removed")
        return simple

    def keep(self, simple: Schema, key: str, value: object, path: str, inside: tuple[str, ...]) -> None:
        if key == "properties" and isinstance(value, dict):
            named = cast(dict[str, object], value)
            simple[key] = {
                name: self.simple(item, f"{path}.{name}" if path else name, inside) for name, item in named.items()
            }
        elif key == "items":
            simple[key] = self.simple(value, f"{path}[]", inside)
        elif key == "anyOf" and isinstance(value, list):
            simple[key] = [self.simple(item, path, inside) for item in cast(list[object], value)]
        elif key == "additionalProperties" and not isinstance(value, bool):
            simple[key] = self.simple(value, f"{path}.*" if path else "*", inside)
        elif key == "type" and isinstance(value, list):
            types = cast(list[str], value)
            simple["anyOf"] = [{"type": item} for item in types]
        else:
            simple[key] = value

    def flat(self, schema: Schema, path: str, inside: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """Resolve the schema's reference, its `allOf` and its null. Returns also the references that were inlined."""
        schema, inside = self.dereferenced(schema, path, inside)
        schema, inside = self.merged(schema, path, inside)
        schema, inside = self.without_null(schema, path, inside)
        return self.one_object(schema, path, inside), inside

    def one_object(self, schema: Schema, path: str, inside: tuple[str, ...]) -> Schema:
        """Offer the properties of all options of an `anyOf` that stands beside properties or describes the arguments."""
        options = schema.get("anyOf")
        if not isinstance(options, list) or (path and "properties" not in schema):
            return schema
        self.note_change(path, "anyOf removed, the properties of all its options are offered")
        properties: Schema = {}
        for option in cast(list[object], options):
            if isinstance(option, dict):
                resolved, _ = self.dereferenced(cast(Schema, option), path, inside)
                properties |= cast(Schema, resolved.get("properties") or {})
        whole = {key: value for key, value in schema.items() if key != "anyOf"}
        return {**whole, "properties": properties | cast(Schema, schema.get("properties") or {})}

    def dereferenced(self, schema: Schema, path: str, inside: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """Replace `$ref` by the schema it refers to. The schema's other keywords take precedence."""
        while isinstance(reference := schema.get("$ref"), str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = self.resolved(reference)
            if reference in inside or target is None:
                self.note_change(
                    path,
                    f"$ref {reference!r} {'is recursive' if reference in inside else 'leads nowhere'}, any value is allowed",
                )
                return rest, inside
            schema, inside = _combined(rest, target), (*inside, reference)
        return schema, inside

    def resolved(self, reference: str) -> Schema | None:
        if not reference.startswith("#"):
            return None
        node = cast(object, self.root)
        for part in reference[1:].strip("/").split("/") if reference.strip("#/") else []:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict):
                return None
            node = cast(Schema, node).get(name)
        return cast(Schema, node) if isinstance(node, dict) else None

    def merged(self, schema: Schema, path: str, inside: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """Merge the parts of `allOf` into one schema, and treat `oneOf` as `anyOf`."""
        inlined = inside
        if isinstance(parts := schema.get("allOf"), list):
            whole: Schema = {key: value for key, value in schema.items() if key != "allOf"}
            for part in cast(list[object], parts):
                if isinstance(part, dict):
                    resolved, around = self.dereferenced(cast(Schema, part), path, inside)
                    whole = _combined(whole, resolved)
                    inlined += around[len(inside) :]
            schema = whole
        if "oneOf" in schema and "anyOf" not in schema:
            schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
        return schema, inlined

    def without_null(self, schema: Schema, path: str, inside: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """Remove null from the types of an optional value: the model leaves out the argument instead."""
        nullable = False
        if isinstance(kinds := schema.get("type"), list) and "null" in kinds:
            others = [kind for kind in cast(list[object], kinds) if kind != "null"]
            schema, nullable = {**schema, "type": others[0] if len(others) == 1 else others}, True
        if isinstance(options := schema.get("anyOf"), list):
            others = [option for option in cast(list[object], options) if not _is_null(option)]
            nullable = nullable or len(others) < len(cast(list[object], options))
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            if len(others) == 1 and isinstance(others[0], dict):
                schema, inside = self.flat({**cast(Schema, others[0]), **rest}, path, inside)
            else:
                schema = {**rest, "anyOf": others}
        if nullable:
            self.note_change(path, "null is not offered, the argument is left out instead")
            if schema.get("default", 0) is None:
                schema = {key: value for key, value in schema.items() if key != "default"}
        return schema, inside


def _is_null(schema: object) -> bool:
    return isinstance(schema, dict) and cast(Schema, schema).get("type") == "null"


def _handed_down(schema: Schema, examples: list[object]) -> Schema:
    """The schema, whose properties and items have the parts of its examples as examples of their own, before theirs."""
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(properties, dict):
        parts = [cast(Schema, example) for example in examples if isinstance(example, dict)]
        inner = {
            name: _with_examples(item, [part[name] for part in parts if name in part])
            for name, item in cast(Schema, properties).items()
        }
        schema = {**schema, "properties": inner}
    if isinstance(items, dict):
        listed = [item for example in examples if isinstance(example, list) for item in cast(list[object], example)]
        schema = {**schema, "items": _with_examples(cast(object, items), listed)}
    return schema


def _with_examples(schema: object, examples: list[object]) -> object:
    if not examples or not isinstance(schema, dict):
        return schema
    return _combined({"examples": examples}, cast(Schema, schema))


def _combined(one: Schema, other: Schema) -> Schema:
    """A schema for which both hold: properties, required and examples are merged, else keywords of `one` take precedence."""
    both = {**other, **one}
    for key in ("properties", "required", "examples"):
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            both[key] = {**cast(Schema, second), **cast(Schema, first)}
        elif isinstance(first, list) and isinstance(second, list):
            both[key] = [
                *(kept := cast(list[object], first)),
                *(item for item in cast(list[object], second) if item not in kept),
            ]
    return both


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
