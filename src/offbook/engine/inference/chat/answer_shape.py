"""Determines the required format of an answer (tool calls, JSON, or either), and compiles it to a grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, cast

from offbook.base.types import Json, Tool

from .grammar import SCHEMA_PARAM, TEXTS_PARAM, TOOLS_PARAM, GrammarError, GrammarMask, Grammars
from .requests import ChatCompletionRequest, DialectError, shortened

MAX_BYTES = 256 * 2**10
"""Largest JSON of one grammar. Compiling takes seconds at this size, and minutes beyond it."""
MAX_TOOLS = 500
"""Most tools of one grammar. The time to compile grows with the square of their number."""
_LARGE = 16 * 2**10  # bytes of JSON


@dataclass(frozen=True)
class AnswerShape:
    """The required format of an answer."""

    tools: dict[str, Tool]  # tools that may be called, by their position in the request
    forced: bool  # whether one of them must be called
    schema: Json  # JSON schema of an answer without a call
    parallel: bool  # whether several calls are allowed
    texts: tuple[str, ...] = ()  # if any, the answer must be one of these

    @property
    def field(self) -> str:
        """The request's field that requires the format."""
        return TEXTS_PARAM if self.texts else TOOLS_PARAM if self.forced else SCHEMA_PARAM


def shape_of(request: ChatCompletionRequest) -> AnswerShape | None:
    """The required format of a request's answer; None if it is free.

    With optional tools and a response_format, the answer is a tool call or follows the format, as in OpenAI's API. Raises
    DialectError for fields that exclude each other, or are too large for a grammar.
    """
    tools = _forced(request)
    response_format = request.response_format
    kind = None if response_format is None or response_format.type == "text" else response_format.type
    texts = request.structured_outputs.choice if request.structured_outputs else []
    if texts and (tools or kind):
        raise DialectError(
            f"{TEXTS_PARAM} cannot be combined with response_format or a forced tool_choice: leave one out",
            param=TEXTS_PARAM,
        )
    if not tools and not kind and not texts:
        return None
    param = TEXTS_PARAM if texts else "tool_choice" if tools else "response_format"
    if tools and kind:
        raise DialectError("response_format cannot be combined with a forced tool_choice", param=param)
    if request.min_tokens or request.ignore_eos:
        raise DialectError(f"min_tokens and ignore_eos cannot be combined with {param}", param=param)
    if texts:
        _check_size(TEXTS_PARAM, texts)
        return AnswerShape({}, False, None, request.most_calls is None, tuple(texts))
    schema: Json = {"type": "object"}
    if kind == "json_schema":
        schema = response_format.json_schema.schema_ if response_format and response_format.json_schema else None
        if schema is None:
            raise DialectError("response_format.json_schema.schema is missing", param=param)
    free = _named(request.tools or []) if not tools and request.tool_choice in (None, "auto") else {}
    _check_size(TOOLS_PARAM, list((tools or free).values()))
    _check_size(SCHEMA_PARAM, schema)
    return AnswerShape(tools or free, bool(tools), None if tools else schema, request.most_calls is None)


class ShapeCompiler:
    """Compiles grammars in threads. Small ones do not wait for large ones."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._small, self._large = TimeLimitedPool(4), TimeLimitedPool(1)

    async def masks(self, shape: AnswerShape, count: int) -> list[GrammarMask]:
        """One mask per choice. Raises DialectError for a schema that cannot be compiled, naming the field."""
        compile_mask, field = self._compiling(shape), shape.field
        size = len(json.dumps([shape.tools, shape.schema, shape.texts]))
        try:
            return await (self._large if size > _LARGE else self._small).run(
                lambda: [compile_mask() for _ in range(count)],
                field,
                f"{field} takes too long to compile to a grammar: use fewer tools, properties and enum values",
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


def _check_size(field: str, value: Json) -> None:
    """Raise DialectError for a value that would take minutes to compile."""
    if isinstance(value, list) and len(cast(list[Json], value)) > MAX_TOOLS:
        count = len(cast(list[Json], value))
        items = "texts" if field == TEXTS_PARAM else "tools"
        raise DialectError(f"{field}: a grammar takes at most {MAX_TOOLS} {items} (got {count})", param=field)
    size = len(json.dumps(value))
    if size > MAX_BYTES:
        raise DialectError(f"{field}: a grammar takes at most {MAX_BYTES} bytes of JSON (got {size})", param=field)


def _forced(request: ChatCompletionRequest) -> dict[str, Tool]:
    """The tools of which one must be called, by position; empty if no call is required."""
    choice = request.tool_choice
    if choice is None or choice == "auto" or choice == "none":
        return {}
    tools = _named(request.tools or [])
    if not tools:
        raise DialectError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    name = choice.function.name
    matching = {key: tool for key, tool in tools.items() if tool["function"]["name"] == name}
    if not matching:
        raise DialectError(
            f"tool_choice names {shortened(name)}, which is not among the tools",
            param="tool_choice",
        )
    return matching


def _named(tools: list[Tool]) -> dict[str, Tool]:
    """The tools by position. Raises DialectError for a tool without a name."""
    for index, tool in enumerate(tools):
        function: Json = tool.get("function")
        if not isinstance(function, dict) or not isinstance(cast(Json, function).get("name"), str):
            raise DialectError(f"tools.{index}.function.name is missing (got {shortened(tool)})", param="tools")
    return {f"tools[{index}]": tool for index, tool in enumerate(tools)}


R = TypeVar("R")

PATIENCE_SECONDS = 30.0
"""Time limit of one piece of work. Its client would not wait longer."""


class TimeLimitedPool:
    """A pool of threads with a time limit. The time spent waiting for a free thread does not count."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="time-limited")
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[[], R], param: str, too_long: str) -> R:
        """Run `work` in a thread, and return its result.

        Raises DialectError with the message `too_long` after `PATIENCE_SECONDS`. The thread stays busy until `work` ends.
        """
        await self._free.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._ended)
        done, _ = await asyncio.wait({future}, timeout=PATIENCE_SECONDS)
        if not done:
            raise DialectError(f"{too_long} (given up after {PATIENCE_SECONDS:.0f} s)", param=param)
        return future.result()

    def _ended(self, future: asyncio.Future[R]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it as unhandled
