"""Requests: sentences that name tools, offer values, or leave the choice open, around filler words."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .desks import Argument, Tool
from .words import FUNCTION_WORDS, Bag, Value, spoken

OPENINGS = [
    "please",
    "can you",
    "could you",
    "could you please",
    "i need you to",
    "i need",
    "we need the",
    "we want",
    "i want the",
    "what is the",
    "tell me the",
    "tell us",
    "show",
    "show me the",
    "get me the",
    "do",
    "use",
    "run",
    "could you run",
    "hello,",
    "hello, please",
    "i would like",
    "let us",
    "now",
    "find the",
    "give us the",
    "give me",
    "look at",
    "check",
    "check the",
    "will you",
    "would you",
    "do the",
    "how about",
    "i'd like the",
    "make it",
    "say",
    "send me the",
    "ask for",
    "help me with",
    "see the",
    "",
    "",
    "",
    "",
]
CLOSINGS = [
    "please",
    "today",
    "now",
    "for me",
    "again",
    "if you can",
    "for us",
    "ok",
    "then",
    "as well",
    "by now",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
]
ORDERS = ["{opening} {task} {given} {closing}"] * 8 + [
    "{given}: {task} {closing}",
    "{given}, {opening} {task}",
    "{given} needs {task} {closing}",
    "{opening} {task}, {given} {closing}",
    "with {given} {opening} {task}",
]
HELD_OUT_FRAMES = [
    "kindly go for {task} {given}",
    "is it possible to have {task} {given}?",
    "my boss asks: {task} {given}",
    "{given} - what about {task}?",
    "hi there! {task} {given}, thanks",
    "we are waiting for the {task} {given}",
]
FILLER_SHARES = (0.4, 0.7, 0.95)
FILLER_MARKS = (",", "!", ":", ".", "?", ";", " -", "...")
LINKERS = ["of", "for", "with", "on", "about", "at", "in", "to", "by", "", "", "", ""]
SEQUELS = ["and then", "then", "and", "and with that", "after that", ", then", "followed by", "to"]


@dataclass(frozen=True)
class Mention:
    """Words that name a tool: all of its name, or its last part."""

    tool: Tool
    text: str
    whole: bool


def mention(rng: random.Random, tool: Tool, tools: Sequence[Tool]) -> Mention:
    """Names a tool by its name, by the parts of its name in a row, or by the last part, if nothing else here has it."""
    last = tool.parts[-1]
    shared = {part for other in tools if other is not tool for part in other.parts}
    shared |= {part for each in tools for argument in each.required + each.optional for part in argument.parts}
    draw = rng.random()
    if draw < 0.25 and len(tool.parts) > 1 and last not in shared:
        return Mention(tool, last, whole=False)
    return Mention(tool, tool.name if draw < 0.5 else " ".join(tool.parts), whole=True)


def offer(bag: Bag, argument: Argument, drawn: Value, bare: bool) -> str:
    """A phrase that offers a value under its argument's name, or the value alone; commas end what could run on."""
    rng = bag.rng
    text = spoken(drawn)
    open_ended = not any(mark in text for mark in "-#@.0123456789") or (text[-1].isalpha() and "@" not in text)
    quote = " " in text or rng.random() < (0.5 if open_ended else 0.12) or (open_ended and bare)
    if isinstance(drawn, str) and quote:
        text, open_ended = f'"{text}"', False
    end = "," if open_ended else ""
    if bare:
        return text
    name = argument.name
    if rng.random() < 0.5:
        name = name.replace("_", " ")
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
    """Words that mean nothing here, some before a mark: function words, and in one of three shares, words like any other."""
    rng = bag.rng
    share = rng.choice(FILLER_SHARES)
    words = [rng.choice(FUNCTION_WORDS) if rng.random() < share else bag.draw() for _ in range(rng.randint(0, most))]
    return [word + rng.choice(FILLER_MARKS) if rng.random() < 0.15 else word for word in words]


def finish(rng: random.Random, text: str) -> str:
    """The sentence with an end mark or none, its first letter large or small."""
    text = " ".join(text.split()).replace(" ,", ",").lstrip(" ,:-").rstrip(",")
    text = text.replace(",?", "?").replace(",.", ".").replace(",:", ":")
    if text[-1] not in "?.!":
        text += rng.choice(["", "", "?", ".", "!"])
    return text[0].upper() + text[1:] if rng.random() < 0.25 and text.split()[0] in FUNCTION_WORDS else text


def soup(bag: Bag, phrases: list[str], most: int) -> str:
    """The phrases in the given order, with filler before, between and after them."""
    pieces = filler(bag, most)
    for text in phrases:
        pieces += [text, *filler(bag, most)]
    return finish(bag.rng, " ".join(pieces or [bag.draw()]))


def named_request(bag: Bag, tasks: list[str], given: str, held_out: bool) -> str:
    """A request that names its tools, in a frame or among filler."""
    rng = bag.rng
    task = f" {rng.choice(SEQUELS)} ".join(tasks)
    if held_out:
        return finish(rng, rng.choice(HELD_OUT_FRAMES).format(task=task, given=given))
    if rng.random() < 0.5:
        opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
        return finish(rng, rng.choice(ORDERS).format(task=task, given=given, opening=opening, closing=closing))
    phrases = [text for text in (task, given) if text]
    rng.shuffle(phrases)
    return soup(bag, phrases, 3)


def open_request(bag: Bag, given: str, hints: list[str]) -> str:
    """A request that offers values among filler; hints are words to scatter, such as a field's name."""
    phrases = [*hints, given]
    bag.rng.shuffle(phrases)
    return soup(bag, [text for text in phrases if text], 4)
