"""Compiles grammars that restrict a completion to JSON, to tool calls in hermes format, or to either."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
import xgrammar
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offbook.base.errors import ConfigError
from offbook.base.schema_patterns import product_of_repeats, written_out
from offbook.base.types import Json, Tool

from ..decoding.generation import NoAllowedToken
from .tool_calls import CLOSE, OPEN

SCHEMA_PARAM = "response_format"
TOOLS_PARAM = "tools"
TEXTS_PARAM = "structured_outputs"
_LONG_SCHEMA = 100_000
"""Characters. With one blank, xgrammar compiles in time quadratic in the number of properties: 14 s for 5,000, with two 2 s."""
_MAX_PATTERN = 50_000
"""Most characters of a pattern whose repeats are written out. `((a{1,35}){1,35}){1,35}` has 43,000, and a mask takes 0.02 s;
with 50 it has 125,000, and one takes up to 1.5 s, in which no other call goes on."""
_MARKUP = re.compile(r"<.+>|\[.+\]")
_NOT_IN_JSON = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters, which JSON strings must escape. xgrammar allows them in strings with a length limit. A tab could
also be white space, but is never needed."""
_NO_TEXT = b"\xff"
"""The text of tokens that grammars must not allow. UTF-8 never contains this byte."""


class GrammarError(ConfigError):
    """A schema that cannot be compiled, or that no JSON satisfies. `param` is the request's field that contains it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class GrammarMask:
    """The state of a compiled grammar in one completion. See `generation.TokenMask`. `param` names the request's field."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: int, param: str) -> None:
        self._matcher = matcher
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._param = param
        self._sampled = 0

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for tokens that the grammar forbids. Raises NoAllowedToken if it forbids all."""
        if not self.allows_some():
            raise NoAllowedToken(
                f"{self._param}: after {self._sampled} tokens of the answer the grammar allows no token: no JSON satisfies "
                "the schema, or one of its parts",
                self._param,
            )
        words = self._bitmask[0].to(logits.device)
        bits = (words[:, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
        return logits.masked_fill(bits.view(-1)[: logits.shape[-1]] == 0, -torch.inf)

    def allows_some(self) -> bool:
        """Whether the grammar allows any next token."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return bool(self._bitmask.any())

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        self._sampled += 1
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise RuntimeError(f"token {token} was sampled although the grammar forbids it")


class Grammars:
    """Compiles grammars for one tokenizer, and caches them. Thread-safe.

    Control tokens are allowed as the marks of a tool call, but not inside JSON. The
    methods raise GrammarError.
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
        self._open: object = {"type": "token", "token": ids[OPEN]} if OPEN in ids else OPEN
        self._close: object = {"type": "token", "token": ids[CLOSE]} if CLOSE in ids else CLOSE

    def json_schema(self, schema: Json) -> GrammarMask:
        """JSON that satisfies a schema."""
        return self._mask(self._checked_schema(schema, SCHEMA_PARAM), SCHEMA_PARAM)

    def one_of(self, texts: Sequence[str]) -> GrammarMask:
        """One of these texts."""
        constants = [{"type": "const_string", "value": text} for text in texts]
        return self._structure({"type": "or", "elements": constants}, TEXTS_PARAM)

    def tool_calls(self, tools: Mapping[str, Tool], *, parallel: bool) -> GrammarMask:
        """One call of these tools, or several if `parallel`. The keys name the tools in errors."""
        return self._structure(self._calls(tools, parallel), TOOLS_PARAM)

    def tool_calls_or_json(self, tools: Mapping[str, Tool], schema: Json, *, parallel: bool) -> GrammarMask:
        """Tool calls, or JSON that satisfies a schema."""
        self._checked_schema(schema, SCHEMA_PARAM)
        answer = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _most_blanks(json.dumps(schema))}
        return self._structure({"type": "or", "elements": [self._calls(tools, parallel), answer]}, SCHEMA_PARAM)

    def _checked_schema(self, schema: Json, param: str) -> xgrammar.CompiledGrammar:
        """Compile a schema on its own. Raises GrammarError, naming `param`, if it is invalid or no JSON satisfies it."""
        for pattern in _patterns(schema):
            _check_pattern(pattern, param)
        try:
            text = json.dumps(schema)
            compiled = self._compiler.compile_json_schema(text, max_whitespace_cnt=_most_blanks(text))
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"{param}: the schema cannot be compiled: {_last_line(error)}", param) from error
        if not self._mask(compiled, param).allows_some():
            raise GrammarError(f"{param}: no JSON satisfies the schema; check its $ref, enum and bounds", param)
        return compiled

    def _structure(self, wanted: object, param: str) -> GrammarMask:
        try:
            compiled = self._compiler.compile_structural_tag({"type": "structural_tag", "format": wanted})
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"{param} cannot be compiled: {_last_line(error)}", param) from error
        return self._mask(compiled, param)

    def _mask(self, compiled: xgrammar.CompiledGrammar, param: str) -> GrammarMask:
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._eos)
        return GrammarMask(matcher, self._vocabulary, param)

    def _calls(self, tools: Mapping[str, Tool], parallel: bool) -> dict[str, object]:
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool["function"], param) for param, tool in tools.items()],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def _tag(self, function: Json, param: str) -> dict[str, object]:
        name = json.dumps(function["name"], ensure_ascii=False)
        parameters: Json = function.get("parameters") or {"type": "object", "properties": {}}
        self._checked_schema(parameters, param)
        blanks = _most_blanks(json.dumps(parameters))
        content = [
            {"type": "const_string", "value": f'\n{{"name": {name}, "arguments": '},
            {"type": "json_schema", "json_schema": parameters, "max_whitespace_cnt": blanks},
            {"type": "const_string", "value": "}\n"},
        ]
        return {
            "type": "tag",
            "begin": self._open,
            "content": {"type": "sequence", "elements": content},
            "end": self._close,
        }


def _most_blanks(schema: str) -> int:
    """Most consecutive white space between the tokens of JSON. The policy would learn to fill answers with what is free to
    repeat; indentation tells a program nothing."""
    return 1 if len(schema) <= _LONG_SCHEMA else 2


def _patterns(schema: object) -> Iterator[str]:
    """Every text that may be a pattern: of `pattern`, and the names in `patternProperties`."""
    if isinstance(schema, list):
        for part in cast(list[object], schema):
            yield from _patterns(part)
    if not isinstance(schema, dict):
        return
    parts = cast(dict[str, object], schema)
    if isinstance(pattern := parts.get("pattern"), str):
        yield pattern
    if isinstance(named := parts.get("patternProperties"), dict):
        yield from cast(dict[str, object], named)
    for part in parts.values():
        yield from _patterns(part)


def _check_pattern(pattern: str, param: str) -> None:
    """Raise GrammarError for a pattern whose nested repeats are too many."""
    try:
        size = written_out(pattern)
    except (re.error, RecursionError, OverflowError):  # xgrammar reads other patterns than Python
        size = product_of_repeats(pattern)
    if size > _MAX_PATTERN:
        raise GrammarError(
            f"{param}: the repeats of the pattern {pattern!r:.200} make {size:,} characters, and at most {_MAX_PATTERN:,} "
            "are allowed: use lower bounds, or none",
            param,
        )


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that structure a chat: special tokens, and added tokens that look like markup."""
    added = tokenizer.added_tokens_decoder.items()
    markup = {token for token, one in added if one.special or _MARKUP.fullmatch(one.content)}
    return frozenset(tokenizer.all_special_ids) | markup


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__
