"""Limits the length of JSON strings, numbers and lists, so that a policy that never stops does not fill the context.

The limits are not part of the schema, because they would make its grammar slow to compile: seconds for a string of at most
4,096 characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_DIGITS = 40
"""Most consecutive digits: more than programs read."""
_ENDS_STRING = re.compile(rb'"')
_STARTS_ITEM = re.compile(rb'[^"]*[,\[{]')
_STARTS_ITEM_AFTER_STRING = re.compile(rb'[^"]*"[^"]*[,\[{]')
_DIGIT = re.compile(rb"[0-9]")


class JsonBounds:
    """The tokens of a vocabulary that continue a string or a number, or begin an item.

    `max_string` is the most characters of a string, `max_items` the most elements and properties of an answer in total.
    Tokens that the grammar requires are allowed beyond these limits. `texts` are the bytes of each token.
    """

    def __init__(self, texts: Sequence[bytes], max_string: int, max_items: int) -> None:
        self.texts = texts
        self.max_string = max_string
        self.max_items = max_items
        self.continues_string = ~_matching(texts, _ENDS_STRING)
        self.starts_item = _matching(texts, _STARTS_ITEM)
        self.starts_item_after_string = _matching(texts, _STARTS_ITEM_AFTER_STRING)
        self.digit = _matching(texts, _DIGIT)

    def begin(self) -> BoundedJson:
        """The state at the beginning of an answer."""
        return BoundedJson(self)


class BoundedJson:
    """The state of the JSON of one answer."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._quoted = False
        self._escaped = False
        self._run = 0  # characters of the current string, or digits of the current number
        self._items = 0

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for tokens that exceed a limit, unless no other token would be allowed."""
        forbidden = self._forbidden()
        if forbidden is None:
            return logits
        limited = logits.masked_fill(forbidden.to(logits.device)[: logits.shape[-1]], -torch.inf)
        return limited if bool(torch.isfinite(limited).any()) else logits

    def _forbidden(self) -> Tensor | None:
        bounds = self._bounds
        if self._quoted and not self._escaped and self._run >= bounds.max_string:
            return bounds.continues_string
        if not self._quoted and self._run >= _DIGITS:
            return bounds.digit
        if self._items >= bounds.max_items:
            return bounds.starts_item_after_string if self._quoted else bounds.starts_item
        return None

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        for byte in self._bounds.texts[token]:
            if self._quoted:
                self._in_string(byte)
            elif byte == ord('"'):
                self._quoted, self._run = True, 0
            else:
                self._run = self._run + 1 if ord("0") <= byte <= ord("9") else 0
                self._items += byte in b",[{"

    def _in_string(self, byte: int) -> None:
        if not self._escaped and byte == ord('"'):
            self._quoted, self._run = False, 0
            return
        self._escaped = not self._escaped and byte == ord("\\")
        self._run += (byte & 0xC0) != 0x80  # counts characters, not bytes, of UTF-8


def _matching(texts: Sequence[bytes], pattern: re.Pattern[bytes]) -> Tensor:
    """Bool [V]: whether the beginning of each token's text matches the pattern."""
    return torch.tensor([pattern.match(text) is not None for text in texts])
