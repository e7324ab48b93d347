"""Compares tool arguments by meaning.

Arguments in a language, such as SQL, code and search queries, have many spellings of the same meaning: their calls' results are
compared.
"""

from __future__ import annotations

import math
import posixpath
import re
import unicodedata
from collections.abc import Mapping
from typing import cast

from offbook.base.text import word_list
from offbook_mcp.tools.result_values import digest_of
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult
from offbook_mcp.tools.tool import Schema, ToolKind
from offbook_mcp.tools.toolset import ModelTool

_PATH_NAME = re.compile(r"(^|_|-)(path|paths|file|files|filename|dir|directory|folder|source|destination)s?$", re.I)
_TIME = re.compile(r"(\d):(\d\d(?::\d\d)?)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_TOLERANCE = 1e-9

WRONG_TYPE = 0.5
"""Score of an argument with the right value in the wrong type, such as `"3"` for 3: some servers reject it."""


def argument_score(expected: Mapping[str, object], actual: Mapping[str, object], parameters: Schema) -> float:
    """The share of equivalent arguments among all arguments of both sides, from 0 to 1.

    1 for equal calls, also without arguments. An argument that equals its default, or an optional one that is null, counts
    as absent.
    """
    expected, actual = spelled_out(expected, parameters), spelled_out(actual, parameters)
    names = expected.keys() | actual.keys()
    if not names:
        return 1.0
    schemas = _properties(parameters)
    scores = [
        value_score(expected[name], actual[name], schemas.get(name, {}), name)
        for name in names
        if name in expected and name in actual
    ]
    return math.fsum(scores) / len(names)


def value_score(expected: object, actual: object, schema: Schema, name: str = "") -> float:
    """1 if both are equivalent, WRONG_TYPE if one is the other as text, else 0."""
    if same_value(expected, actual, schema, name):
        return 1.0
    return WRONG_TYPE if _same_as_text(expected, actual) else 0.0


def same_value(expected: object, actual: object, schema: Schema, name: str = "") -> bool:
    """Whether both values are equivalent.

    Numbers compare by value; text ignores white space; enumerated text ignores case; paths and times of day compare in
    normal form; lists by element, in any order if the schema has uniqueItems; objects by key.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if isinstance(expected, str) and isinstance(actual, str):
        return _same_text(expected, actual, schema, name)
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return _same_list(list(cast(list[object], expected)), list(cast(list[object], actual)), schema, name)
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return argument_score(cast(Mapping[str, object], expected), cast(Mapping[str, object], actual), schema) == 1.0
    return expected is None and actual is None


def spelled_out(arguments: Mapping[str, object], parameters: Schema) -> dict[str, object]:
    """Remove arguments that have the same meaning as leaving them out: defaults, and null for optional ones."""
    schemas = _properties(parameters)
    listed = parameters.get("required")
    required = cast(list[object], listed) if isinstance(listed, list) else []

    def is_default(value: object, schema: Schema, name: str) -> bool:
        return "default" in schema and same_value(schema["default"], value, {**schema, "default": None}, name)

    return {
        name: value
        for name, value in arguments.items()
        if name in required or not (value is None or is_default(value, schemas.get(name, {}), name))
    }


def _properties(schema: Schema) -> dict[str, Schema]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        name: cast(Schema, property_schema) if isinstance(property_schema, dict) else {}
        for name, property_schema in cast(dict[str, object], properties).items()
    }


def _same_text(expected: str, actual: str, schema: Schema, name: str) -> bool:
    expected, actual = _squeezed(expected), _squeezed(actual)
    if "enum" in schema:
        expected, actual = expected.casefold(), actual.casefold()
    if expected == actual:
        return True
    if _is_path(name, expected):
        return normal_path(expected) == normal_path(actual)
    return _normal_time(expected) == _normal_time(actual)


def _same_list(expected: list[object], actual: list[object], schema: Schema, name: str) -> bool:
    if len(expected) != len(actual):
        return False
    items = schema.get("items")
    inner = cast(Schema, items) if isinstance(items, dict) else {}
    if not schema.get("uniqueItems"):
        return all(same_value(*pair, inner, name) for pair in zip(expected, actual, strict=True))
    left = list(actual)
    for value in expected:
        match = next((index for index, other in enumerate(left) if same_value(value, other, inner, name)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _squeezed(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _is_path(name: str, value: str) -> bool:
    return "://" not in value and (_PATH_NAME.search(name) is not None or value.startswith(("/", "./", "../")))


def normal_path(path: str) -> str:
    """Normalise a path: `/a//b/./c/` becomes `/a/b/c`, backslashes become `/`, and the empty path `.`."""
    return posixpath.normpath(path.replace("\\", "/")) if path else "."


def _normal_time(text: str) -> str:
    match = _TIME.fullmatch(text)
    return f"0{match[1]}:{match[2]}" if match else text


def _same_as_text(expected: object, actual: object) -> bool:
    """Whether one value is the text form of the other, a number or a boolean."""
    text, value = (expected, actual) if isinstance(expected, str) else (actual, expected)
    if not isinstance(text, str) or isinstance(value, str):
        return False
    if isinstance(value, bool):
        return text.strip().casefold() == str(value).casefold()
    spelled = _NUMBER.fullmatch(text.strip())
    return isinstance(value, int | float) and spelled is not None and same_value(float(text), value, {})


_LANGUAGES = frozenset(
    word_list(
        """code command cypher equation expression formula graphql jmespath jq jsonpath program query regex regexp script
    selector sparql sql statement where xpath"""
    )
)
_PLURALS = {"queries": "query", "statements": "statement", "expressions": "expression", "commands": "command"}
_TEXTS = frozenset(["string", "str", "text", "snippet", "clause", "body"])
"""Last words after the name of a language, as in `query_string`."""
_OF_CODE = frozenset(["python", "source", "shell", "javascript", "js", "r", "sql", "program", "script"])
"""Words before `code` that make it a program: a `currency_code` is none."""
_DESCRIBED = re.compile(
    r"\b(sql|cypher|sparql|graphql|jq|jmespath|jsonpath|xpath|regex|regular expression|python code|source code"
    r"|(?:math\w*|arithmetic|formula|boolean) expression|expression to evaluate)\b",
    re.IGNORECASE,
)
_TOKENS = re.compile(r"'[^']*'|\"[^\"]*\"|\w+|[^\w\s]")


def free_form_arguments(tool: ModelTool) -> frozenset[str]:
    """The names of the tool's arguments that are written in a language, by their names and descriptions."""
    properties = cast(dict[str, object], tool.parameters.get("properties") or {})
    return frozenset(
        name
        for name, schema in properties.items()
        if isinstance(schema, dict) and _is_free_form(name, cast(Schema, schema))
    )


def result_digest(tools: RolloutTools, tool: ModelTool, result: ToolResult) -> str:
    """A hash of what a call returned; "" if it failed, may write, or has no arguments in a language.

    The text that a write returns, such as `1 row`, does not show what was written.
    """
    if result.is_error or tool.tool.kind is not ToolKind.READ or not free_form_arguments(tool):
        return ""
    return digest_of(tools.neutral(result.full_text))


def same_code(expected: str, actual: str) -> bool:
    """Whether two texts in a language differ only in white space, in the case of words, and in a final semicolon."""
    return _tokens(expected) == _tokens(actual)


def _is_free_form(name: str, schema: Schema) -> bool:
    items = schema.get("items")
    kind = cast(Schema, items).get("type") if isinstance(items, dict) else schema.get("type", "string")
    if kind != "string" or "enum" in schema or "format" in schema:
        return False
    words = [
        _PLURALS.get(word, word) for word in re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())
    ]
    if len(words) > 1 and words[-1] in _TEXTS:
        words.pop()
    if words and words[-1] in _LANGUAGES:
        return words[-1] != "code" or len(words) == 1 or words[-2] in _OF_CODE
    return _DESCRIBED.search(str(schema.get("description", ""))) is not None


def _tokens(text: str) -> list[str]:
    tokens = [token if token[0] in "'\"" else token.casefold() for token in _TOKENS.findall(text)]
    return tokens[:-1] if tokens[-1:] == [";"] else tokens
