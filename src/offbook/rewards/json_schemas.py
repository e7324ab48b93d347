"""Whether an answer is JSON that fits a schema, both of which strangers may have written."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.schema_patterns import SlowPatternError, compile_pattern, pattern_time, with_timed_patterns
from offbook.base.types import Json


def schema_validator(schema: Mapping[str, Any], where: str) -> Any:
    """The validator of a schema, of its own draft or 2020-12. References lead to definitions in the schema: nothing is
    downloaded. Raises ConfigError that begins with `where`, MissingExtraError."""
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
        referencing: Any = importlib.import_module("referencing")
    except ImportError as error:
        raise MissingExtraError("jsonschema", "judge") from error
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        specification = importlib.import_module("referencing.jsonschema").DRAFT202012
        resolver = referencing.Registry().resolver_with_root(specification.create_resource(schema))
        for name, value in _fields(schema):
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                resolver.lookup(value)
            for pattern in (value,) if name == "pattern" else value if name == "patternProperties" else ():
                compile_pattern(str(pattern))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    except referencing.exceptions.Unresolvable as error:
        raise ConfigError(
            f"{where}: the reference {error.ref!r} does not lead to a definition in the schema"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: a pattern that Python cannot read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply") from error
    return with_timed_patterns(kind)(schema, registry=referencing.Registry())


def answer_fault(answer: str, validator: Any = None) -> str:
    """Why a text is no JSON, or does not fit; "" if it does. `validator`: of `schema_validator`."""
    try:
        value: Json = json.loads(answer)
        with pattern_time():
            fault: Any = None if validator is None else next(validator.iter_errors(value), None)
    except SlowPatternError as error:
        return f"not checked to the end: {error}"
    except ValueError as error:
        return f"no JSON: {error}"
    except RecursionError:
        return "nested too deeply, or its schema refers to itself without end"
    return "" if fault is None else f"{fault.json_path}: {fault.message}"


def _fields(schema: object) -> Iterator[tuple[str, Any]]:
    """Every name and value in a schema, however deep."""
    left: list[object] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            fields = cast(Mapping[str, object], part)
            yield from fields.items()
            left += fields.values()
        elif isinstance(part, list):
            left += cast(list[object], part)
