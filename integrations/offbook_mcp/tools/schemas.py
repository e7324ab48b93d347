"""Reduces a tool's JSON schema to what chat templates and providers support.

A server may use all of JSON Schema. Every template renders and every provider accepts only types, properties, required,
items, enums, descriptions, defaults and simple bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
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
_MAX_LEVELS = 6
"""Deepest level of a value. The template of the bundled policy refuses objects below it."""
_MAX_NODES = 1_000
"""Limit on the schemas after inlining: nested references can make a small schema huge."""


def simplified(schema: Schema, *, examples: bool = False) -> Schema:
    """Reduce an object schema: inline references, drop null from unions, and remove unsupported keywords. `examples`: keep those,
    each value with also the parts of the examples around it.

    >>> simplified({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}})
    {'properties': {'a': {'type': 'string'}}, 'type': 'object'}
    """
    parameters = _Simplification(schema, examples).simple(schema, -1, frozenset())
    properties = parameters.get("properties")
    return {**parameters, "type": "object", "properties": properties if isinstance(properties, dict) else {}}


@dataclass
class _Simplification:
    """The reduction of one schema: the root for references, and the number of schemas visited."""

    root: Schema
    examples: bool = False
    nodes: int = 0

    def simple(self, schema: object, level: int, inside: frozenset[str]) -> Schema:
        """Reduce a schema; {} (any value) where it is none, too deep or one too many. `level`: -1 for the arguments themselves; a dot in
        a name counts as one more, as the template counts.
        `inside` has the references being inlined around it, to detect recursion."""
        self.nodes += 1
        if not isinstance(schema, dict) or self.nodes > _MAX_NODES or level >= _MAX_LEVELS:
            return {}
        schema, inside = self.flat(cast(Schema, schema), inside)
        if isinstance(options := schema.get("anyOf"), list) and (level < 0 or "properties" in schema):
            schema = self.one_object(schema, cast(list[object], options), inside)
        simple: Schema = {}
        if self.examples and isinstance(examples := schema.get("examples"), list):
            schema = _handed_down(schema, cast(list[object], examples))
            simple["examples"] = examples
        for key, value in schema.items():
            if key == "const":
                simple["enum"] = [value]
            elif key == "type" and isinstance(value, list):
                simple["anyOf"] = [{"type": item} for item in cast(list[str], value)]
            elif key in _KEPT:
                simple[key] = self.kept(key, value, level, inside)
        return simple

    def kept(self, key: str, value: object, level: int, inside: frozenset[str]) -> object:
        """A keyword's value, with the schemas in it reduced."""
        if key == "properties" and isinstance(value, dict):
            named = cast(dict[str, object], value)
            return {name: self.simple(item, level + 1 + name.count("."), inside) for name, item in named.items()}
        if key == "items" or (key == "additionalProperties" and not isinstance(value, bool)):
            return self.simple(value, level + 1, inside)
        if key == "anyOf" and isinstance(value, list):
            return [self.simple(item, level, inside) for item in cast(list[object], value)]
        return value

    def one_object(self, schema: Schema, options: list[object], inside: frozenset[str]) -> Schema:
        """Offer the properties of all options of an `anyOf` that stands beside properties or describes the arguments."""
        properties: Schema = {}
        for option in options:
            if isinstance(option, dict):
                resolved, _ = self.dereferenced(cast(Schema, option), inside)
                properties |= cast(Schema, resolved.get("properties") or {})
        whole = {key: value for key, value in schema.items() if key != "anyOf"}
        return {**whole, "properties": properties | cast(Schema, schema.get("properties") or {})}

    def dereferenced(self, schema: Schema, inside: frozenset[str]) -> tuple[Schema, frozenset[str]]:
        """Replace `$ref` by the schema it refers to, or by any value if it is recursive or leads nowhere. The schema's other
        keywords take precedence. Returns also the references that were inlined."""
        while isinstance(reference := schema.get("$ref"), str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = None if reference in inside else self.resolved(reference)
            if target is None:
                return rest, inside
            schema, inside = _combined(rest, target), inside | {reference}
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

    def flat(self, schema: Schema, inside: frozenset[str]) -> tuple[Schema, frozenset[str]]:
        """Resolve the schema's reference, merge its `allOf`, and drop null: the model leaves out the argument instead. `oneOf` is
        treated as `anyOf`."""
        schema, inside = self.dereferenced(schema, inside)
        if isinstance(parts := schema.get("allOf"), list):
            inlined, schema = inside, {key: value for key, value in schema.items() if key != "allOf"}
            for part in cast(list[object], parts):
                if isinstance(part, dict):
                    resolved, around = self.dereferenced(cast(Schema, part), inlined)
                    schema, inside = _combined(schema, resolved), inside | around
        if "oneOf" in schema and "anyOf" not in schema:
            schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
        if isinstance(kinds := schema.get("type"), list) and "null" in kinds:
            others = [kind for kind in cast(list[object], kinds) if kind != "null"]
            schema = {**schema, "type": others[0] if len(others) == 1 else others}
        if isinstance(options := schema.get("anyOf"), list):
            others = [option for option in cast(list[object], options) if not _is_null(option)]
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            if len(others) == 1 and isinstance(others[0], dict):
                schema, inside = self.flat({**cast(Schema, others[0]), **rest}, inside)
            else:
                schema = {**rest, "anyOf": others}
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
