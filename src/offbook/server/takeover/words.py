"""How strange the words of a new input are, compared with the inputs that were seen: drift of what users write.

Source: Laxhammar and Falkman, "Conformal prediction for distribution-independent anomaly detection in streaming vessel data"
(StreamKDD 2010): an input is strange if few of those that were seen score as high, p <= epsilon. While inputs come from
what was seen, at most a share of epsilon is strange, whatever the score. The score is the mean inverse document frequency
of the words (Spaerck Jones, "A statistical interpretation of term specificity", 1972), by feature hashing (Weinberger et
al., arXiv 0902.2206), so that no word is kept. Inputs are scored in order, each before it is counted: early scores are
somewhat high, which makes fewer inputs strange.
"""

from __future__ import annotations

import math
import re
import zlib

from pydantic import BaseModel, Field

BUCKETS = 4096
EPSILON = 0.02
LEAST = 60
"""Scored inputs before any is strange."""
UNSCORED = 30
"""Inputs that are only counted: without any, each word is new."""
MOST_SCORES = 500
MOST_WORDS = 500
"""Words of an input that are read, the last ones."""
_WORD = re.compile(r"[^\W\d]+|\d+")


class SeenWords(BaseModel):
    """The words of inputs: for each bucket the number of inputs that have a word of it; and the newest scores."""

    inputs: int = 0
    buckets: dict[int, int] = Field(default_factory=dict[int, int])
    scores: list[float] = Field(default_factory=list[float])

    def learn(self, text: str) -> None:
        """Take in an input."""
        words = _buckets(text)
        if self.inputs >= UNSCORED:
            self.scores = [*self.scores, self._score(words)][-MOST_SCORES:]
        self.inputs += 1
        for bucket in words:
            self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def strange(self, text: str) -> bool:
        """Whether at most a share of EPSILON of the inputs that were seen, with this one, score as high."""
        if len(self.scores) < LEAST:
            return False
        score = self._score(_buckets(text))
        return 1 + sum(seen >= score for seen in self.scores) <= EPSILON * (1 + len(self.scores))

    def _score(self, words: frozenset[int]) -> float:
        """The mean inverse document frequency as a share of the largest, that of a new word; 0 without words."""
        most = math.log(self.inputs + 1)
        common = sum(math.log(1 + self.buckets.get(bucket, 0)) for bucket in words)
        return round(1 - common / (most * len(words)), 4) if words and most else 0.0


def _buckets(text: str) -> frozenset[int]:
    """The buckets of a text's words; all numbers are one word."""
    words = _WORD.findall(text.lower())[-MOST_WORDS:]
    return frozenset(
        zlib.crc32(b"0" if word[0].isdigit() else word.encode("utf-8", "replace")) % BUCKETS for word in words
    )
