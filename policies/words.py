"""Words and values for episodes: English words and invented ones. Training words and held-out words are disjoint."""

import json
import pydoc_data.topics
import random
import re
import zlib
from functools import cache

Value = str | int | float

CONSONANTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "cl",
    "cr",
    "dr",
    "fl",
    "gr",
    "pl",
    "pr",
    "sh",
    "sl",
    "sp",
    "st",
    "th",
    "tr",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "ie", "oo", "ou"]
ENDINGS = ["", "", "", "n", "r", "s", "t", "l", "d", "m", "ck", "nt", "ng"]
FUNCTION_WORDS = [
    "a",
    "about",
    "again",
    "all",
    "already",
    "also",
    "an",
    "and",
    "any",
    "are",
    "ask",
    "at",
    "but",
    "by",
    "can",
    "check",
    "could",
    "did",
    "do",
    "does",
    "find",
    "for",
    "from",
    "get",
    "give",
    "had",
    "has",
    "have",
    "he",
    "help",
    "here",
    "how",
    "I",
    "I'd",
    "i",
    "i'd",
    "if",
    "in",
    "is",
    "it",
    "its",
    "just",
    "know",
    "let",
    "look",
    "make",
    "many",
    "me",
    "much",
    "my",
    "need",
    "no",
    "not",
    "now",
    "of",
    "on",
    "one",
    "or",
    "our",
    "please",
    "say",
    "see",
    "send",
    "she",
    "should",
    "show",
    "so",
    "some",
    "still",
    "tell",
    "that",
    "the",
    "them",
    "then",
    "there",
    "these",
    "they",
    "this",
    "those",
    "to",
    "today",
    "us",
    "want",
    "was",
    "we",
    "we've",
    "what",
    "what's",
    "when",
    "where",
    "which",
    "who",
    "who's",
    "why",
    "will",
    "with",
    "would",
    "yet",
    "you",
    "your",
]
"""Words around a request that never name a tool, an argument or a value."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@cache
def english(held_out: bool) -> tuple[str, ...]:
    """English words of 3 to 9 letters from Python's help topics. One in ten, by checksum, is held out."""
    candidates = set(re.findall(r"\b[a-z]{3,9}\b", " ".join(pydoc_data.topics.topics.values()).lower()))
    return tuple(sorted(word for word in candidates if (zlib.crc32(word.encode()) % 10 == 0) == held_out))


def fragments(rng: random.Random) -> str:
    """Parts of two English training words, so that every token occurs at every place of a word."""
    cuts: list[str] = []
    for _ in range(2):
        text = rng.choice(english(held_out=False))
        begin = rng.randint(0, len(text) - 2)
        cuts.append(text[begin : begin + rng.randint(2, 5)])
    return "".join(cuts)


def word(rng: random.Random, held_out: bool) -> str:
    """A random word: English in three cases of four, else of syllables or of random letters. In training, a third of
    the English ones are made of fragments."""
    draw = rng.random()
    if draw < 0.25 and not held_out:
        return fragments(rng)
    if draw < 0.74:
        return rng.choice(english(held_out))
    if draw < 0.95:
        syllables = range(rng.choice([1, 1, 2, 2, 2, 3]))
        return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in syllables) + rng.choice(ENDINGS)
    return "".join(rng.choice(LETTERS) for _ in range(rng.choice([2, 2, 3, 3, 4, 5, 6])))


class WordSource:
    """Draws words that are all different within one episode. So a word that occurs twice in an episode was repeated on
    purpose."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self._used = set(FUNCTION_WORDS)

    def draw(self) -> str:
        """A word that was not drawn before and is no function word."""
        while (drawn := word(self.rng, self.held_out)) in self._used:
            pass
        self._used.add(drawn)
        return drawn


def number(rng: random.Random) -> int:
    """An integer of one to five digits, each length equally likely."""
    return rng.randint(0, 10 ** rng.randint(1, 5) - 1)


def identifier(source: WordSource) -> str:
    """A word-like value with a visible end: 4821, A-1042, #77, a date, an e-mail address, teal-42."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.34:
        return str(number(rng))
    if draw < 0.38:
        return f"{rng.randint(0, 999):03}-{rng.randint(0, 9999):04}"
    if draw < 0.60:
        return "".join(rng.choice(LETTERS) for _ in range(rng.choice([1, 1, 2, 3]))).upper() + f"-{number(rng)}"
    if draw < 0.70:
        return f"#{number(rng)}"
    if draw < 0.78:
        return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if draw < 0.86:
        return f"{source.draw()}@{source.draw()}.{rng.choice(['com', 'org', 'net', 'example'])}"
    if draw < 0.94:
        return f"{source.draw()}-{rng.randint(0, 99)}"
    return f"{rng.randint(0, 999)}.{rng.randint(0, 99):02}"


def title(source: WordSource) -> str:
    """One to three capitalised words, like a person or a place."""
    return " ".join(source.draw().capitalize() for _ in range(source.rng.choice([1, 2, 2, 3])))


def phrase(source: WordSource) -> str:
    """One to three lower-case words."""
    return " ".join(source.draw() for _ in range(source.rng.choice([1, 1, 1, 1, 2, 2, 3])))


def value(source: WordSource) -> str:
    """Any value: an identifier, a phrase, a title, or a number with a unit."""
    draw = source.rng.random()
    if draw < 0.45:
        return identifier(source)
    if draw < 0.75:
        return phrase(source)
    if draw < 0.88:
        return title(source)
    return f"{number(source.rng)} {source.draw()}"


def value_text(drawn: Value) -> str:
    """A value as sentences show it: strings bare, numbers as in JSON."""
    return drawn if isinstance(drawn, str) else json.dumps(drawn)
