"""Requests: sentences that name tools, offer values, or leave the choice open, around filler words."""

import random

from .desks import Argument, Tool
from .words import Bag, Value, spoken

FUNCTION_WORDS = [
    "what",
    "where",
    "which",
    "who",
    "how",
    "much",
    "many",
    "when",
    "why",
    "is",
    "are",
    "was",
    "did",
    "do",
    "does",
    "has",
    "have",
    "had",
    "the",
    "a",
    "an",
    "of",
    "for",
    "to",
    "in",
    "on",
    "at",
    "by",
    "with",
    "from",
    "about",
    "me",
    "my",
    "we",
    "our",
    "us",
    "you",
    "your",
    "it",
    "its",
    "this",
    "that",
    "these",
    "those",
    "i",
    "he",
    "she",
    "they",
    "them",
    "can",
    "could",
    "will",
    "would",
    "should",
    "please",
    "tell",
    "show",
    "find",
    "give",
    "get",
    "need",
    "want",
    "know",
    "see",
    "look",
    "check",
    "say",
    "send",
    "ask",
    "help",
    "let",
    "make",
    "now",
    "today",
    "still",
    "yet",
    "already",
    "again",
    "there",
    "here",
    "not",
    "no",
    "any",
    "all",
    "some",
    "one",
    "also",
    "just",
    "then",
    "and",
    "or",
    "but",
    "so",
    "if",
    "who's",
    "what's",
    "i'd",
    "we've",
]
FRAMES = [
    "please {task} {given}",
    "can you {task} {given}?",
    "{task} {given}",
    "i need you to {task} {given}",
    "{given}: {task}",
    "what is the {task} {given}?",
    "{given}, {task}",
    "we want {task} {given} today",
    "could you run {task} {given}?",
    "use {task} {given}",
    "tell me the {task} {given}.",
    "show {task} {given}",
    "i would like {task} {given}.",
    "{given} needs {task}",
    "do {task} now {given}",
    "get me the {task} {given}",
    "hello, {task} {given} please",
]
HELD_OUT_FRAMES = [
    "kindly go for {task} {given}",
    "is it possible to have {task} {given}?",
    "my boss asks: {task} {given}",
    "{given} - what about {task}?",
    "hi there! {task} {given}, thanks",
    "we are waiting for the {task} {given}",
]
LINKERS = ["of", "for", "with", "on", "about", "at", "in", "to", "by", "", "", "", ""]
SEQUELS = ["and then", "then", "and", "and with that", "after that", ", then", "followed by", "to"]


def mention(rng: random.Random, tool: Tool, distinctive: list[str]) -> str:
    """Words that name a tool: its name, its parts in a row, or one part that is its alone."""
    draw = rng.random()
    if distinctive and draw < 0.25:
        return rng.choice(distinctive)
    if draw < 0.5:
        return tool.name
    return " ".join(tool.parts)


def offer(bag: Bag, argument: Argument, drawn: Value, bare: bool) -> str:
    """A phrase that offers a value under its argument's name, or the value alone; commas end what could run on."""
    rng = bag.rng
    text = spoken(drawn)
    open_ended = not any(mark in text for mark in "-#@.0123456789") or (text[-1].isalpha() and "@" not in text)
    value_first = not bare and rng.random() < 0.06
    quote = rng.random() < (0.5 if open_ended else 0.12) or (open_ended and (bare or value_first))
    if isinstance(drawn, str) and quote:
        text, open_ended = f'"{text}"', False
    end = "," if open_ended else ""
    if bare:
        return text
    name = argument.name
    if "_" in name and rng.random() < 0.7:
        name = name.split("_")[0] if rng.random() < 0.5 else name.replace("_", " ")
    if value_first:
        return f"{text} as {name}"
    draw = rng.random()
    if draw < 0.74:
        return f"{name} {text}{end}"
    if draw < 0.82:
        return f"{name}: {text}{end}"
    return f"{name} is {text}{end}" if draw < 0.92 else f"{name}={text}{end}"


def offers(bag: Bag, arguments: dict[Argument, Value], bare: bool) -> str:
    """All offered values in one phrase, in any order."""
    phrases = [offer(bag, argument, drawn, bare) for argument, drawn in arguments.items()]
    bag.rng.shuffle(phrases)
    text = bag.rng.choice([" and ", " ", " with "]).join(phrases).replace(", and", " and")
    return f"{bag.rng.choice(LINKERS)} {text}".strip()


def filler(bag: Bag, most: int) -> list[str]:
    """Words that mean nothing here: function words and words drawn like any other."""
    count = bag.rng.randint(0, most)
    share = bag.rng.choice([0.4, 0.7, 0.95])
    return [bag.rng.choice(FUNCTION_WORDS) if bag.rng.random() < share else bag.draw() for _ in range(count)]


def finish(rng: random.Random, text: str) -> str:
    """The sentence with an end mark or none, its first letter large or small."""
    text = (
        " ".join(text.split()).replace(" ,", ",").rstrip(",").replace(",?", "?").replace(",.", ".").replace(",:", ":")
    )
    if text[-1] not in "?.!":
        text += rng.choice(["", "", "?", ".", "!"])
    return text[0].upper() + text[1:] if rng.random() < 0.25 and text.split()[0] in FUNCTION_WORDS else text


def soup(bag: Bag, phrases: list[str], most: int) -> str:
    """The phrases in the given order, with filler before, between and after them."""
    pieces = filler(bag, most)
    for text in phrases:
        pieces += [text, *filler(bag, most)]
    return finish(bag.rng, " ".join(pieces or [bag.draw()]))


def named_request(bag: Bag, tasks: list[str], given: str, level: float, held_out: bool) -> str:
    """A request that names its tools, in a fixed frame or among filler."""
    rng = bag.rng
    task = f" {rng.choice(SEQUELS)} ".join(tasks)
    frames = HELD_OUT_FRAMES if held_out else FRAMES
    if rng.random() < (1.0 if held_out else 0.5):
        return finish(rng, rng.choice(frames).format(task=task, given=given))
    phrases = [text for text in (task, given) if text]
    rng.shuffle(phrases)
    return soup(bag, phrases, round(1 + 2 * level))


def open_request(bag: Bag, given: str, hints: list[str], level: float) -> str:
    """A request that offers values among filler; hints are words to scatter, such as a field's name."""
    phrases = [*hints, given]
    bag.rng.shuffle(phrases)
    return soup(bag, [text for text in phrases if text], round(1 + 3 * level))
