"""Bounds on JSON that a grammar leaves open: a policy that knows no end would go on to the end of the context.

A bound in the schema itself would make its grammar slow to compile: seconds for a string of at most 4,096 characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_DIGITS = 40
"""In a row: more than any number has that a program reads."""
_ENDS_STRING = re.compile(rb'"')
_STARTS_ITEM = re.compile(rb'[^"]*[,\[{]')
_STARTS_ITEM_AFTER_STRING = re.compile(rb'[^"]*"[^"]*[,\[{]')
_DIGIT = re.compile(rb"[0-9]")


class JsonBounds:
    """The tokens that go on with a string, a number or a list of items, for one vocabulary. `max_string`: characters of a
    string; `max_items`: elements and properties of an answer in all. What the grammar demands goes past them."""

    def __init__(self, texts: Sequence[bytes], max_string: int, max_items: int) -> None:
        self.texts = texts
        self.max_string = max_string
        self.max_items = max_items
        self.goes_on_string = ~_matching(texts, _ENDS_STRING)
        self.starts_item = _matching(texts, _STARTS_ITEM)
        self.starts_item_after_string = _matching(texts, _STARTS_ITEM_AFTER_STRING)
        self.digit = _matching(texts, _DIGIT)

    def begin(self) -> BoundedJson:
        """The state at the beginning of an answer."""
        return BoundedJson(self)


class BoundedJson:
    """One answer's JSON as far as it is sampled."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._quoted = False
        self._escaped = False
        self._run = 0  # characters of the string, or digits of the number, that goes on
        self._items = 0

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for tokens that go on past a bound, as long as another is allowed."""
        refused = self._refused()
        if refused is None:
            return logits
        kept = logits.masked_fill(refused.to(logits.device)[: logits.shape[-1]], -torch.inf)
        return kept if bool(torch.isfinite(kept).any()) else logits

    def _refused(self) -> Tensor | None:
        bounds = self._bounds
        if self._quoted and not self._escaped and self._run >= bounds.max_string:
            return bounds.goes_on_string
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
        self._run += (byte & 0xC0) != 0x80  # once for each character of UTF-8


def _matching(texts: Sequence[bytes], pattern: re.Pattern[bytes]) -> Tensor:
    """[V], whether each token's text begins with the pattern."""
    return torch.tensor([pattern.match(text) is not None for text in texts])
