"""A tool's JSON schema as models' templates and providers take it, with a list of what was changed.

What a server may write: all of JSON Schema. What every template can render and every provider accepts: types, properties,
required, items, enums, descriptions, defaults and plain bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from .tool import Schema

_KEPT = frozenset(
    [
        "additionalProperties",
        "anyOf",
        "default",
        "description",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
        "multipleOf",
        "pattern",
        "properties",
        "required",
        "type",
        "uniqueItems",
    ]
)
_NOISE = frozenset(
    ["$comment", "$defs", "$id", "$schema", "definitions", "deprecated", "examples", "readOnly", "title", "writeOnly"]
)
"""Dropped without a word: they constrain nothing, and cost tokens."""
_DEEPEST = 12
_MOST_NODES = 1_000
"""Inlined references multiply; a server could make a small schema explode."""


@dataclass(frozen=True)
class SimplifiedSchema:
    """`parameters` is an object schema; `changes` has a line for each thing that was lost."""

    parameters: Schema
    changes: tuple[str, ...]


def simplified(schema: Schema) -> SimplifiedSchema:
    """The schema with references inlined, nulls dropped from unions, and unknown keywords removed.

    `{"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}` becomes `{"type": "string"}`.
    """
    work = _Simplification(schema)
    parameters = work.simple(schema, "", ())
    properties = parameters.get("properties")
    parameters["type"] = "object"
    parameters["properties"] = properties if isinstance(properties, dict) else {}
    return SimplifiedSchema(parameters, tuple(work.changes))


@dataclass
class _Simplification:
    root: Schema
    changes: list[str] = field(default_factory=list[str])
    nodes: int = 0

    def say(self, path: str, what: str) -> None:
        line = f"{path or 'the arguments'}: {what}"
        if line not in self.changes:
            self.changes.append(line)

    def simple(self, schema: object, path: str, inside: tuple[str, ...]) -> Schema:
        """One schema at `path`; `inside` are the references that are being replaced around it."""
        if not isinstance(schema, dict):
            if schema is not True:
                self.say(path, f"{schema!r} is no schema, any value is allowed")
            return {}
        self.nodes += 1
        if path.count(".") + path.count("[]") > _DEEPEST or self.nodes > _MOST_NODES:
            self.say(path, f"deeper than {_DEEPEST} levels, or beyond {_MOST_NODES:,} schemas: any value is allowed")
            return {}
        schema, inside = self.dereferenced(cast(Schema, schema), path, inside)
        schema = self.merged(schema, path, inside)
        schema = self.without_null(schema, path)
        simple: Schema = {}
        for key, value in schema.items():
            if key in _KEPT:
                self.keep(simple, key, value, path, inside)
            elif key == "const":
                simple["enum"] = [value]
            elif key not in _NOISE:
                self.say(path, f"{key} removed")
        return simple

    def keep(self, simple: Schema, key: str, value: object, path: str, inside: tuple[str, ...]) -> None:
        if key == "properties" and isinstance(value, dict):
            named = cast(dict[str, object], value)
            simple[key] = {
                name: self.simple(each, f"{path}.{name}".lstrip("."), inside) for name, each in named.items()
            }
        elif key == "items":
            simple[key] = self.simple(value, f"{path}[]", inside)
        elif key == "anyOf" and isinstance(value, list):
            simple[key] = [self.simple(each, path, inside) for each in cast(list[object], value)]
        elif key == "additionalProperties" and not isinstance(value, bool):
            simple[key] = self.simple(value, f"{path}.*".lstrip("."), inside)
        elif key == "type" and isinstance(value, list):
            types = cast(list[str], value)
            simple["anyOf"] = [{"type": each} for each in types]
        else:
            simple[key] = value

    def dereferenced(self, schema: Schema, path: str, inside: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """The schema with its `$ref` replaced by what it refers to; its other keywords win."""
        while isinstance(reference := schema.get("$ref"), str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target = self.resolved(reference)
            if reference in inside or target is None:
                self.say(
                    path,
                    f"$ref {reference!r} {'is recursive' if reference in inside else 'leads nowhere'}, any value is allowed",
                )
                return rest, inside
            schema, inside = {**target, **rest}, (*inside, reference)
        return schema, inside

    def resolved(self, reference: str) -> Schema | None:
        if not reference.startswith("#"):
            return None
        place = cast(object, self.root)
        for part in reference[1:].strip("/").split("/") if reference.strip("#/") else []:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(place, dict):
                return None
            place = cast(Schema, place).get(name)
        return cast(Schema, place) if isinstance(place, dict) else None

    def merged(self, schema: Schema, path: str, inside: tuple[str, ...]) -> Schema:
        """`allOf` laid over one another, `oneOf` read as `anyOf`."""
        if isinstance(parts := schema.get("allOf"), list):
            whole: Schema = {key: value for key, value in schema.items() if key != "allOf"}
            for part in cast(list[object], parts):
                if isinstance(part, dict):
                    whole = _laid_over(whole, self.dereferenced(cast(Schema, part), path, inside)[0])
            schema = whole
        if "oneOf" in schema and "anyOf" not in schema:
            schema = {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}
        return schema

    def without_null(self, schema: Schema, path: str) -> Schema:
        """The schema without the null of an optional value: such an argument is left out instead."""
        nullable = False
        if isinstance(kinds := schema.get("type"), list) and "null" in kinds:
            others = [kind for kind in cast(list[object], kinds) if kind != "null"]
            schema, nullable = {**schema, "type": others[0] if len(others) == 1 else others}, True
        if isinstance(options := schema.get("anyOf"), list):
            others = [each for each in cast(list[object], options) if not _is_null(each)]
            nullable = nullable or len(others) < len(cast(list[object], options))
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            if len(others) == 1 and isinstance(others[0], dict):
                schema = self.dereferenced({**cast(Schema, others[0]), **rest}, path, ())[0]
            else:
                schema = {**rest, "anyOf": others}
        if nullable:
            self.say(path, "null is not offered, the argument is left out instead")
            if schema.get("default", 0) is None:
                schema = {key: value for key, value in schema.items() if key != "default"}
        return schema


def _is_null(schema: object) -> bool:
    return isinstance(schema, dict) and cast(Schema, schema).get("type") == "null"


def _laid_over(one: Schema, other: Schema) -> Schema:
    """Both schemas hold: properties and required are united, other keywords of the first win."""
    both = {**other, **one}
    for key in ("properties", "required"):
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            both[key] = {**cast(Schema, second), **cast(Schema, first)}
        elif isinstance(first, list) and isinstance(second, list):
            both[key] = list(dict.fromkeys([*cast(list[object], first), *cast(list[object], second)]))
    return both
