"""A tool parser for vLLM that reads calls as the embedded engine does, with our own reader of hermes' format and of calls
without tags. vLLM imports this module by its name (`--tool-parser-plugin`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
)
from vllm.entrypoints.generate.base.protocol import ToolCall as VllmCall
from vllm.renderers.chat_utils import make_tool_call_id  # pyright: ignore[reportUnknownVariableType]  # partly annotated
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from offbook.base.types import Tool

from ..chat.families import HERMES_CALLS
from ..chat.tool_calls import HermesParser, ToolCall
from ..chat.untagged_calls import UntaggedCalls


class HermesCallsParser(Hermes2ProToolParser):
    """Reads the calls of one choice. Forced calls are vLLM's own matter."""

    engine_based_streaming = True  # so that vLLM calls `finish_streaming`

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        offered: list[Any] = [getattr(tool, "function", tool) for tool in self.tools]  # of chats, or of responses
        self._offered: list[Tool] = [{"function": {"name": function.name}} for function in offered]
        self._reader = self._new_reader()
        self._count = 0

    def _new_reader(self) -> UntaggedCalls:
        return UntaggedCalls(HermesParser(), self._offered)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Content and calls of a complete text."""
        if request.tool_choice == "none":  # vLLM asks all the same, and drops the calls
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        reader = self._new_reader()
        pieces = [*reader.push(model_output), *reader.finish(truncated=False)]
        calls = [
            VllmCall(type="function", function=FunctionCall(name=piece.name, arguments=piece.arguments))
            for piece in pieces
            if isinstance(piece, ToolCall)
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=_text(pieces) or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The content and calls that are final after a piece of text; None if there are none."""
        if request.tool_choice == "none":
            return DeltaMessage(content=delta_text) if delta_text else None
        return self._delta(self._reader.push(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back until the end of the text."""
        return self._delta(self._reader.finish(truncated=False))

    def _delta(self, pieces: list[str | ToolCall]) -> DeltaMessage | None:
        calls: list[DeltaToolCall] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                function = DeltaFunctionCall(name=piece.name, arguments=piece.arguments)
                calls.append(
                    DeltaToolCall(index=self._count, type="function", id=make_tool_call_id(), function=function)
                )
                self._count += 1
        return DeltaMessage(content=_text(pieces) or None, tool_calls=calls) if pieces else None


def _text(pieces: list[str | ToolCall]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


ToolParserManager.register_module(HERMES_CALLS, module=HermesCallsParser)
