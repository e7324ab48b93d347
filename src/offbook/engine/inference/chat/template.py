"""Renders chat requests to prompt tokens with the model's chat template."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from transformers import PreTrainedTokenizerBase

from offbook.base.types import Json

from ...chat_template import ChatTemplate, PromptError
from ...protocol import TOO_LONG
from .least_tokens import LeastTokens
from .requests import ChatCompletionRequest, DialectError

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
        self.template = ChatTemplate(tokenizer)
        self._limit = limit
        self._least = LeastTokens(tokenizer)
        self._lock = threading.Lock()
        self._prompts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._kept = 0  # characters of the keys of _prompts
        self.template.encode("")  # the first call can change the tokenizer's settings, which is not thread-safe

    def prompt_ids(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        """The prompt's tokens.

        Raises DialectError for messages that the template cannot render or leaves out, or that are certainly longer than
        the context.
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
        prompt_ids = self._rendered(request, options)
        self._keep(key, prompt_ids)
        return prompt_ids

    def _effort(self, request: ChatCompletionRequest) -> dict[str, Json]:
        """Convert `reasoning_effort` to the template's variables, as vLLM does. Raises DialectError if it has none."""
        effort = request.reasoning_effort
        if effort is None:
            return {}
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if not self.template.variables.intersection(variables):
            raise DialectError(
                "reasoning_effort is not supported by this model: its chat template has no variable for effort or thinking; "
                "leave it out",
                param="reasoning_effort",
            )
        return {name: value for name, value in variables.items() if name in self.template.variables}

    def _keep(self, key: str, prompt_ids: tuple[int, ...]) -> None:
        with self._lock:
            if key not in self._prompts:
                self._prompts[key] = prompt_ids
                self._kept += len(key)
            while len(self._prompts) > _MAX_PROMPTS or self._kept > _MAX_CHARACTERS:
                self._kept -= len(self._prompts.popitem(last=False)[0])

    def _rendered(self, request: ChatCompletionRequest, options: dict[str, Json]) -> tuple[int, ...]:
        try:
            text = self.template.render(request.messages, request.tools, options)
        except PromptError as error:
            raise DialectError(str(error), param="messages") from error
        least = self._least.of(text)
        if least > self._limit:
            raise DialectError(
                f"the context is at most {self._limit} tokens (--max-model-len); the prompt has {len(text)} characters, "
                f"which are at least {least} tokens: shorten the prompt",
                param="messages",
                code=TOO_LONG,
            )
        return tuple(self.template.encode(text))
