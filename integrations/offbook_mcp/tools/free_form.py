"""Arguments in a language, such as SQL, code and search queries: many spellings mean the same, so results are compared."""

from __future__ import annotations

import re
from typing import cast

from offbook.base.text import word_list

from .effects import ToolKind
from .result_values import digest_of
from .results import ToolResult
from .rollout_tools import RolloutTools
from .tool import Schema
from .toolset import ModelTool

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
