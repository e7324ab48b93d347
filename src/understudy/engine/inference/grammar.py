"""Grammars that a completion must follow: JSON, tool calls in hermes format, or one of the two."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# xgrammar is only partly typed.

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import torch
import xgrammar
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...errors import ConfigError
from ...types import Json, Tool
from .hermes import CLOSE, OPEN

_CALL_SPACES = 2
_JSON_SPACES = 40
"""White space in a row: enough for indented JSON, and no endless run of it."""
_MARKUP = re.compile(r"<.+>|\[.+\]")
_NOT_IN_JSON = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""JSON escapes these (a tab may be white space, but need not); xgrammar lets them into strings of bounded length."""
_NO_TEXT = b"\xff"
"""No text has this byte, so no grammar of text allows a token that is spelled with it."""


class GrammarError(ConfigError):
    """A schema that cannot be compiled."""


class GrammarMask:
    """A compiled grammar's state in one completion. See `generation.TokenMask`."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, eos: Sequence[int], vocabulary: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(eos))
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf where the grammar allows no token."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        words = self._bitmask[0].to(logits.device)
        bits = (words[:, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
        return logits.masked_fill(bits.view(-1)[: logits.shape[-1]] == 0, -torch.inf)

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise RuntimeError(f"token {token} was sampled although the grammar refuses it")


class Grammars:
    """Compiles grammars for one tokenizer; compiled ones are kept. Thread-safe.

    Control tokens are allowed where a call begins or ends, and nowhere in JSON.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int], vocabulary: int) -> None:
        self._eos = sorted(eos)
        self._vocabulary = vocabulary
        marks = {token for token in control_tokens(tokenizer) if token < vocabulary}
        facts = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=self._eos)
        texts = [
            _NO_TEXT if token in marks or _NOT_IN_JSON.search(text) else text
            for token, text in enumerate(facts.decoded_vocab)
        ]
        facts = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary,
            stop_token_ids=self._eos,
            add_prefix_space=facts.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(facts, cache_limit_bytes=64 * 2**20)
        ids = {text: token for text, token in tokenizer.get_vocab().items() if token in marks}
        self._open: Json = {"type": "token", "token": ids[OPEN]} if OPEN in ids else OPEN
        self._close: Json = {"type": "token", "token": ids[CLOSE]} if CLOSE in ids else CLOSE

    def json_object(self) -> GrammarMask:
        """Any JSON object."""
        return self._mask(
            self._compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=_JSON_SPACES)
        )

    def json_schema(self, schema: Json, field: str) -> GrammarMask:
        """JSON that follows a schema. `field` names it in errors."""
        return self._mask(self._compiled(schema, field))

    def tool_calls(self, tools: Sequence[Tool], *, parallel: bool) -> GrammarMask:
        """One call of one of these tools, or several when `parallel`."""
        return self._structure(self._calls(tools, parallel), tools)

    def tool_calls_or_json(self, tools: Sequence[Tool], schema: Json, field: str, *, parallel: bool) -> GrammarMask:
        """Tool calls as above, or JSON that follows a schema. `field` names it in errors."""
        answer = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _JSON_SPACES}
        self._compiled(schema, field)  # alone first, so that an error names it
        return self._structure({"type": "or", "elements": [self._calls(tools, parallel), answer]}, tools)

    def _compiled(self, schema: Json, field: str) -> xgrammar.CompiledGrammar:
        try:
            return self._compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=_JSON_SPACES)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"{field} cannot be compiled: {_brief(error)}") from error

    def _structure(self, wanted: Json, tools: Sequence[Tool]) -> GrammarMask:
        try:
            return self._mask(self._compiler.compile_structural_tag({"type": "structural_tag", "format": wanted}))
        except (RuntimeError, ValueError, TypeError) as error:
            names = [tool["function"]["name"] for tool in tools]
            raise GrammarError(f"tools: the parameters of {names} cannot be compiled: {_brief(error)}") from error

    def _calls(self, tools: Sequence[Tool], parallel: bool) -> dict[str, Json]:
        """Calls of these tools as a format of structural tags."""
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool["function"]) for tool in tools],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def _tag(self, function: Json) -> dict[str, Json]:
        """One tool's call as a structural tag."""
        name = json.dumps(function["name"], ensure_ascii=False)
        parameters: Json = function.get("parameters") or {"type": "object", "properties": {}}
        content = [
            {"type": "const_string", "value": f'\n{{"name": {name}, "arguments": '},
            {"type": "json_schema", "json_schema": parameters, "max_whitespace_cnt": _CALL_SPACES},
            {"type": "const_string", "value": "}\n"},
        ]
        return {
            "type": "tag",
            "begin": self._open,
            "content": {"type": "sequence", "elements": content},
            "end": self._close,
        }

    def _mask(self, compiled: xgrammar.CompiledGrammar) -> GrammarMask:
        return GrammarMask(compiled, self._eos, self._vocabulary)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that structure a chat and are no text: special ones, and added ones that are written as markup."""
    added = tokenizer.added_tokens_decoder.items()
    markup = {token for token, one in added if one.special or _MARKUP.fullmatch(one.content)}
    return frozenset(tokenizer.all_special_ids) | markup


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__
