"""Renders chat requests to prompt tokens with the model's chat template."""

from __future__ import annotations

import json
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Set

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from offbook.base.types import Json

from ...chat_template import ChatTemplate, PromptError
from ...protocol import TOO_LONG, PromptOptions
from .requests import ChatCompletionRequest, CompletionRequest, DialectError

_NFC_SHRINKS = 4
"""Most characters that NFC composes into one: the longest canonical decomposition (Unicode Standard Annex 15)."""


class LeastTokens:
    """A lower bound for the number of tokens of a text, from the length of the tokenizer's longest token.

    The bound holds only if the tokenizer keeps every character of a text. For other tokenizers it is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary))  # byte-level tokens have one character per byte
        backend = getattr(tokenizer, "backend_tokenizer", None)
        facts: Json = json.loads(backend.to_str()) if backend is not None else None
        self._known = facts is not None and _keeps_all(facts, vocabulary.keys())
        self._composes = facts is not None and any(part["type"] == "NFC" for part in _parts(facts["normalizer"]))

    def of(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`; 0 if there is none."""
        if not self._known:
            return 0
        shrinks = _NFC_SHRINKS if self._composes and not unicodedata.is_normalized("NFC", text) else 1
        return -(-len(text) // (self._longest * shrinks))


def _keeps_all(facts: Json, vocabulary: Set[str]) -> bool:
    """Whether each character of a text becomes part of a token: every byte has a token, and nothing is removed."""
    model: Json = facts["model"]
    splits, changes = _parts(facts["pre_tokenizer"]), _parts(facts["normalizer"])
    if any(part["type"] == "ByteLevel" for part in splits):
        bytes_kept = set(ByteLevel.alphabet()) <= vocabulary
    else:
        bytes_kept = bool(model.get("byte_fallback")) and {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary
    return (
        bytes_kept
        and model["type"] == "BPE"
        and not any(token["lstrip"] or token["rstrip"] for token in facts["added_tokens"])
        and all(part["type"] in ("NFC", "Prepend") or _is_space_mark(part) for part in changes)
        and all(part["type"] in ("ByteLevel", "Metaspace", "Digits") or _keeps_splits(part) for part in splits)
    )


def _keeps_splits(part: Json) -> bool:
    return part["type"] == "Split" and part["behavior"] != "Removed"


def _is_space_mark(part: Json) -> bool:
    return part["type"] == "Replace" and part["pattern"] == {"String": " "} and len(part["content"]) == 1


def _parts(component: Json) -> list[Json]:
    """The parts of a normalizer or pre-tokenizer, which can be missing, a single part, or a sequence."""
    if component is None:
        return []
    nested = component.get("normalizers") or component.get("pretokenizers")
    return nested if component["type"] == "Sequence" else [component]


_RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors", "chat_template"}
)
_MAX_PROMPTS = 512
_MAX_CHARACTERS = 4 * 2**20


class ChatRenderer:
    """Renders chats of up to `limit` tokens. Thread-safe.

    Caches recent prompts, because rollouts of one scenario begin with the same messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int, prompts: PromptOptions | None = None) -> None:
        self.template = ChatTemplate(tokenizer, prompts)
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
            "add_generation_prompt": request.add_generation_prompt is not False and not request.continue_final_message,
            "continue_final_message": bool(request.continue_final_message),
        }
        variables = request.chat_template_kwargs or {}
        if reserved := _RESERVED & variables.keys():
            raise DialectError(f"chat_template_kwargs may not set {sorted(reserved)}", param="chat_template_kwargs")
        options |= variables
        key = json.dumps([request.messages, request.tools or None, options])
        with self._lock:
            if key in self._prompts:
                self._prompts.move_to_end(key)
                return self._prompts[key]
        prompt_ids = self._rendered(request, options)
        self._keep(key, prompt_ids)
        return prompt_ids

    def plain_ids(self, request: CompletionRequest) -> tuple[int, ...]:
        """The tokens of a prompt that no template changes. Raises DialectError for one that is longer than the context."""
        if not isinstance(request.prompt, str):
            return tuple(request.prompt)
        self._check_length(request.prompt, "prompt")
        return tuple(self.template.encode(request.prompt, special=request.add_special_tokens))

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
        self._check_length(self.template.shown(text), "messages")
        return tuple(self.template.encode(text))

    def _check_length(self, text: str, param: str) -> None:
        least = self._least.of(text)
        if least > self._limit:
            raise DialectError(
                f"the context is at most {self._limit} tokens (--max-model-len); the prompt has {len(text)} characters, "
                f"which are at least {least} tokens: shorten the prompt",
                param=param,
                code=TOO_LONG,
            )
