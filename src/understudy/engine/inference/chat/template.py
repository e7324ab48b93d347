"""Renders chat messages to prompt tokens with the model's chat template."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' tokenizers are only partly typed.

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ....errors import ConfigError
from ....types import Json, Message
from ...protocol import TOO_LONG
from .least_tokens import LeastTokens
from .requests import ChatCompletionRequest, DialectError, shortened

_TELLS_STRINGS = re.compile(r"arguments\s+is\s+(not\s+)?(string|mapping)")
_RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors", "chat_template"}
)
_MAX_PROMPTS = 512
_MAX_CHARACTERS = 4 * 2**20


class ChatRenderer:
    """Renders chats of up to `limit` tokens. Thread-safe.

    Caches recent prompts, because rollouts of one scenario begin with the same messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise ConfigError(
                "the model's folder has no chat template: add chat_template.jinja, or chat_template to tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._raw_arguments = bool(_TELLS_STRINGS.search(template))
        self._variables = frozenset(re.findall(r"\w+", template))
        self._limit = limit
        self._least = LeastTokens(tokenizer)
        self._lock = threading.Lock()
        self._prompts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._kept = 0  # characters of the keys of _prompts
        tokenizer.encode("")  # the first call can change the tokenizer's settings, which is not thread-safe

    def prompt_ids(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        """The prompt's tokens.

        Raises DialectError for messages that the template cannot render, or that are certainly longer than the context.
        """
        options = {
            "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
            "continue_final_message": request.continue_final_message,
        }
        if reserved := _RESERVED & request.chat_template_kwargs.keys():
            raise DialectError(f"chat_template_kwargs may not set {sorted(reserved)}", param="chat_template_kwargs")
        options |= self._effort(request) | request.chat_template_kwargs
        key = json.dumps([request.messages, request.tools or None, options])
        with self._lock:
            if key in self._prompts:
                self._prompts.move_to_end(key)
                return self._prompts[key]
        messages = [self._message(message, index) for index, message in enumerate(request.messages)]
        prompt_ids = self._rendered(messages, request.tools or None, options)
        self._keep(key, prompt_ids)
        return prompt_ids

    def _effort(self, request: ChatCompletionRequest) -> dict[str, Json]:
        """Convert `reasoning_effort` to the template's variables, as vLLM does. Raises DialectError if it has none."""
        effort = request.reasoning_effort
        if effort is None:
            return {}
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if not self._variables.intersection(variables):
            raise DialectError(
                "reasoning_effort is not supported by this model: its chat template has no variable for effort or thinking; "
                "leave it out",
                param="reasoning_effort",
            )
        return {name: value for name, value in variables.items() if name in self._variables}

    def _keep(self, key: str, prompt_ids: tuple[int, ...]) -> None:
        with self._lock:
            if key not in self._prompts:
                self._prompts[key] = prompt_ids
                self._kept += len(key)
            while len(self._prompts) > _MAX_PROMPTS or self._kept > _MAX_CHARACTERS:
                self._kept -= len(self._prompts.popitem(last=False)[0])

    def _rendered(self, messages: list[Message], tools: list[Json] | None, options: dict[str, Json]) -> tuple[int, ...]:
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise DialectError(f"messages do not fit the chat template: {error}", param="messages") from error
        least = self._least.of(str(text))
        if least > self._limit:
            raise DialectError(
                f"the context is at most {self._limit} tokens (--max-model-len); the prompt has {len(text)} characters, "
                f"which are at least {least} tokens: shorten the prompt",
                param="messages",
                code=TOO_LONG,
            )
        return tuple(self._tokenizer.encode(str(text), add_special_tokens=False))

    def _message(self, message: Message, index: int) -> Message:
        """Convert a message for the template: parts become text, and arguments a string or a mapping."""
        if not isinstance(message.get("role"), str):
            got = shortened(message.get("role"))
            raise DialectError(f"messages.{index}.role must be a string (got {got})", param="messages")
        shown = {name: value for name, value in message.items() if value is not None or name == "content"}
        shown["content"] = _text(message.get("content"), index)
        if thought := shown.get("reasoning") or shown.get("reasoning_content"):
            shown |= {"reasoning": thought, "reasoning_content": thought}  # templates use one or the other
        calls = message.get("tool_calls")
        if calls:
            shown["tool_calls"] = [self._call(call, f"messages.{index}.tool_calls") for call in calls]
        elif "tool_calls" in shown:
            del shown["tool_calls"]
        return shown

    def _call(self, call: Json, where: str) -> Json:
        """Convert a tool call. Templates that accept strings get the original arguments; others get a mapping."""
        try:
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            if isinstance(arguments, str) and not self._raw_arguments:
                arguments = json.loads(arguments)
            return {**call, "function": {**function, "name": str(function["name"]), "arguments": arguments}}
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DialectError(
                f"{where}: {shortened(call)} is not a tool call ({error!r})", param="messages"
            ) from error


def _text(content: Json, index: int) -> str:
    """Content as one text. Parts are joined by newlines, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts: list[str] = []
        for place, part in enumerate(cast(list[Json], content)):
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = f"of type {shortened(part.get('type'))}: " if isinstance(part, dict) else ""
                raise DialectError(
                    f"messages.{index}.content.{place}: only text parts are supported (got one {kind}{shortened(part)})",
                    param="messages",
                )
            parts.append(text)
        return "\n".join(parts)
    got = shortened(content)
    raise DialectError(f"messages.{index}.content must be text or a list of parts (got {got})", param="messages")
