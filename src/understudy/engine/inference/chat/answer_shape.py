"""The shape that a request asks of its answer: tool calls, JSON, or one of the two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ....types import Json, Tool
from .grammar import SCHEMA_PARAM, TEXTS_PARAM, TOOLS_PARAM, GrammarError, GrammarMask, Grammars
from .requests import ChatCompletionRequest, DialectError, shortened
from .time_limit import Aside

MAX_BYTES = 256 * 2**10
"""Of the JSON that one grammar is compiled from. Compiling takes up to seconds for so much, and minutes for more."""
MAX_TOOLS = 500
"""The time to compile them grows with the square of their number."""
_LARGE = 16 * 2**10


@dataclass(frozen=True)
class AnswerShape:
    """What an answer must look like. `tools`, by their places, may be called; `schema`: a JSON schema to follow otherwise.

    `forced`: one of `tools` must be called. `texts`: the answer is one of these, and nothing else.
    """

    tools: dict[str, Tool]
    forced: bool
    schema: Json
    parallel: bool
    texts: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The request's field that shapes the answer."""
        return TEXTS_PARAM if self.texts else TOOLS_PARAM if self.forced else SCHEMA_PARAM


def shape_of(request: ChatCompletionRequest) -> AnswerShape | None:
    """None where the answer is free. With tools to choose from, a response_format shapes the answer, as it does in
    OpenAI's API: calls stay possible. Raises DialectError for what cannot be combined or is too large."""
    tools = _forced(request)
    wanted = request.response_format
    kind = None if wanted is None or wanted.type == "text" else wanted.type
    texts = request.structured_outputs.choice if request.structured_outputs else []
    if texts and (tools or kind):
        raise DialectError(f"{TEXTS_PARAM} stands alone: no response_format, no forced tool_choice", param=TEXTS_PARAM)
    if not tools and not kind and not texts:
        return None
    param = TEXTS_PARAM if texts else "tool_choice" if tools else "response_format"
    if tools and kind:
        raise DialectError("response_format cannot be combined with a forced tool_choice", param=param)
    if request.min_tokens or request.ignore_eos:
        raise DialectError(f"min_tokens and ignore_eos cannot be combined with {param}", param=param)
    if texts:
        _bounded(TEXTS_PARAM, texts)
        return AnswerShape({}, False, None, request.parallel_tool_calls, tuple(texts))
    schema: Json = {"type": "object"}
    if kind == "json_schema":
        schema = wanted.json_schema.schema_ if wanted and wanted.json_schema else None
        if schema is None:
            raise DialectError("response_format.json_schema.schema is missing", param=param)
    free = _named(request.tools or []) if not tools and request.tool_choice in (None, "auto") else {}
    _bounded(TOOLS_PARAM, list((tools or free).values()))
    _bounded(SCHEMA_PARAM, schema)
    return AnswerShape(tools or free, bool(tools), None if tools else schema, request.parallel_tool_calls)


class Shapes:
    """Compiles shapes beside the event loop; small ones never wait for large ones."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._small, self._large = Aside(4), Aside(1)

    async def masks(self, shape: AnswerShape, count: int) -> list[GrammarMask]:
        """One mask per choice. Raises DialectError naming the field that shapes the answer."""
        compile_mask, field = self._compiling(shape), shape.field
        size = len(json.dumps([shape.tools, shape.schema, shape.texts]))
        try:
            return await (self._large if size > _LARGE else self._small).run(
                lambda: [compile_mask() for _ in range(count)],
                field,
                f"{field} takes too long to be compiled into a grammar: take fewer tools, properties and enum values",
            )
        except GrammarError as error:
            raise DialectError(str(error), param=error.param) from error

    def _compiling(self, shape: AnswerShape) -> Callable[[], GrammarMask]:
        grammars, parallel = self._grammars, shape.parallel
        if shape.texts:
            return lambda: grammars.one_of(shape.texts)
        if shape.forced:
            return lambda: grammars.tool_calls(shape.tools, parallel=parallel)
        if shape.tools:
            return lambda: grammars.tool_calls_or_json(shape.tools, shape.schema, parallel=parallel)
        return lambda: grammars.json_schema(shape.schema)


def _bounded(field: str, value: Json) -> None:
    """Refuse what would keep the compiler busy for minutes."""
    if isinstance(value, list) and len(cast(list[Json], value)) > MAX_TOOLS:
        count = len(cast(list[Json], value))
        items = "texts" if field == TEXTS_PARAM else "tools"
        raise DialectError(f"{field}: a grammar takes at most {MAX_TOOLS} {items} (got {count})", param=field)
    size = len(json.dumps(value))
    if size > MAX_BYTES:
        raise DialectError(f"{field}: a grammar takes at most {MAX_BYTES} bytes of JSON (got {size})", param=field)


def _forced(request: ChatCompletionRequest) -> dict[str, Tool]:
    """The tools of which one must be called, by their places; empty when none must."""
    choice = request.tool_choice
    if choice is None or choice == "auto" or choice == "none":
        return {}
    tools = _named(request.tools or [])
    if not tools:
        raise DialectError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    wanted = choice.function.name
    named = {place: tool for place, tool in tools.items() if tool["function"]["name"] == wanted}
    if not named:
        raise DialectError(
            f"tool_choice names {shortened(wanted)}, which is not among the tools",
            param="tool_choice",
        )
    return named


def _named(tools: list[Tool]) -> dict[str, Tool]:
    """The tools by their places; each must have a name."""
    for at, tool in enumerate(tools):
        function: Json = tool.get("function")
        if not isinstance(function, dict) or not isinstance(cast(Json, function).get("name"), str):
            raise DialectError(f"tools.{at}.function.name is missing (got {shortened(tool)})", param="tools")
    return {f"tools[{at}]": tool for at, tool in enumerate(tools)}
