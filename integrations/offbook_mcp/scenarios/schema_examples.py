"""Reads the `examples` of a tool's own schema, which the schema that the model sees does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import cast

from ..tools.tool import Schema

_STEP = re.compile(r"\[\]|[^.\[\]]+")
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
