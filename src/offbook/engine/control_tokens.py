"""Text of others that spells a control token stays text: it never becomes the token, which would begin or end a turn.

A template writes control tokens by their spelling, `<|im_end|>`, so a rendered prompt does not show which of them a message
contains. Before rendering, spellings in messages are replaced by marks that nobody can guess. To encode a prompt with marks, a
second tokenizer is used that knows the control tokens by other names: there a spelling is plain text, and the tokens around it
are those of the whole text. Prompts without spellings are encoded as ever.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers' tokenizers are only partly typed.

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from offbook.base.types import Json, Message, Tool

from .inference.chat.thoughts import CLOSE, OPEN
from .inference.chat.tool_calls import MARKS

T = TypeVar("T")
_OF_ANSWERS = frozenset({*MARKS, OPEN, CLOSE})
"""Tokens that an answer's text may contain because the policy sampled them: of calls that cannot be parsed, and of thoughts."""


class ControlTokens:
    """The control tokens of a tokenizer, and of its chat templates. Thread-safe.

    All special tokens are kept out of every message, except that an assistant's own text may contain those of calls and
    thoughts. Tokens that are not special but written by the templates (`<tool_response>` in many) are kept out of users' text,
    tools' results and definitions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: str) -> None:
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, is_special in added.items() if is_special and text.strip()}
        written = {text for text, is_special in added.items() if not is_special and text.strip() and text in templates}
        self._all = _pattern(special | written)
        self._of_system = _pattern(special)
        self._of_assistant = _pattern(special - _OF_ANSWERS)
        self._special = special
        self._nonce = secrets.token_hex(8)  # letters and digits: no template and no JSON escapes them
        self._marks = {text: f"q{self._nonce}x{number}x" for number, text in enumerate(sorted(special | written))}
        self._spelled = {mark: text for text, mark in self._marks.items()}
        self._any_mark = re.compile(f"q{self._nonce}x[0-9]+x")
        self._lock = Lock()
        self._second: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None

    def unprotected(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Control tokens that text can still become: this tokenizer splits no text around them, or finds them anyway."""
        if self._backend is None:
            return sorted(self._special)
        ids: dict[str, int] = tokenizer.get_vocab()
        return [
            text
            for text in sorted(self._special)
            if ids[text] in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        ]

    def are_in(self, text: str) -> bool:
        """Whether a template's text contains a control token."""
        return bool(self._all.search(text))

    def marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, options: Mapping[str, Json]
    ) -> tuple[Sequence[Message], Sequence[Tool] | None, Mapping[str, Json]]:
        """Messages, tools and a template's variables with marks in place of spellings; the same objects without any."""
        if self._backend is None or not self._all.search(
            json.dumps([messages, tools, options], ensure_ascii=False, default=str)
        ):
            return messages, tools, options
        of_roles = {"assistant": self._of_assistant, "system": self._of_system, "developer": self._of_system}
        return (
            [self._replaced(message, of_roles.get(message["role"], self._all)) for message in messages],
            self._replaced(tools, self._all),
            self._replaced(options, self._of_system),
        )

    def shown(self, text: str) -> str:
        """A rendered text with spellings in place of marks."""
        return self._any_mark.sub(lambda mark: self._spelled[mark[0]], text) if self._nonce in text else text

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a rendered text with marks; None for a text without."""
        if self._nonce not in text:
            return None
        second, names, ids = self._second_tokenizer()
        written = self._all.sub(lambda token: names[token[0]], text)  # what is spelled here, the template wrote
        return [ids.get(token, token) for token in second.encode(self.shown(written), add_special_tokens=False).ids]

    def _replaced(self, value: T, pattern: re.Pattern[str]) -> T:
        """A JSON value with marks in place of spellings in all of its strings."""

        def replaced(part: Any) -> Any:
            if isinstance(part, str):
                return pattern.sub(lambda token: self._marks[token[0]], part)
            if isinstance(part, dict):
                return {replaced(name): replaced(item) for name, item in cast(dict[str, Json], part).items()}
            return [replaced(item) for item in cast(list[Json], part)] if isinstance(part, list | tuple) else part

        return replaced(value)

    def _second_tokenizer(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer that knows control tokens by other names, those names, and its ids -> the real ones. Built at first
        use: it takes a second for a vocabulary of 150,000."""
        with self._lock:
            if self._second is None:
                assert self._backend is not None, "without one, no text is marked"
                names = {text: mark.replace("q", "p", 1) for text, mark in self._marks.items()}
                source = self._backend.to_str()
                start = source.index("[", source.index('"added_tokens"'))
                added, end = json.JSONDecoder().raw_decode(source, start)
                renamed = [token | {"content": names.get(token["content"], token["content"])} for token in added]
                second = Tokenizer.from_str(source[:start] + json.dumps(renamed) + source[end:])
                second.no_truncation()
                second.no_padding()
                known = second.get_vocab(with_added_tokens=True)
                ids = {known[new["content"]]: int(old["id"]) for new, old in zip(renamed, added, strict=True)}
                self._second = second, names, ids
            return self._second


def _pattern(words: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds the longest word at a place; nothing, without words."""
    return re.compile(_branches(words) if words else r"(?!)")


def _branches(words: Collection[str]) -> str:
    """Words as an expression that branches once a character: a vocabulary has a thousand control tokens.

    >>> _branches(["<a>", "<ab>", "[b]"])
    '(?:<a(?:>|b>)|\\\\[b\\\\])'
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word[1:])
    optional = by_first.pop("", None) is not None
    branches = [re.escape(first) + _branches(rest) for first, rest in sorted(by_first.items())]
    joined = branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)})" if branches else ""
    return f"{joined}?" if optional and branches else joined
