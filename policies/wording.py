"""Requests as sentences: they name tools, state values, or leave the choice of the tool open, among filler words."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .tool_sets import Argument, Tool
from .words import FUNCTION_WORDS, Value, WordSource, value_text

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
ORDERS = ["{opening} {task} {values} {closing}"] * 8 + [
    "{values}: {task} {closing}",
    "{values}, {opening} {task}",
    "{values} needs {task} {closing}",
    "{opening} {task}, {values} {closing}",
    "with {values} {opening} {task}",
]
"""Sentence frames of training. Repeated ones are more likely."""
HELD_OUT_FRAMES = [
    "kindly go for {task} {values}",
    "is it possible to have {task} {values}?",
    "my boss asks: {task} {values}",
    "{values} - what about {task}?",
    "hi there! {task} {values}, thanks",
    "we are waiting for the {task} {values}",
]
"""Sentence frames that training never has."""
FILLER_SHARES = (0.4, 0.7, 0.95)
FILLER_MARKS = (",", "!", ":", ".", "?", ";", " -", "...")
LINKERS = ["of", "for", "with", "on", "about", "at", "in", "to", "by", "", "", "", ""]
SEQUELS = ["and then", "then", "and", "and with that", "after that", ", then", "followed by", "to"]


@dataclass(frozen=True)
class Mention:
    """Words of a request that name a tool: its whole name, or only the last part."""

    tool: Tool
    text: str
    whole: bool


def mention(rng: random.Random, tool: Tool, tools: Sequence[Tool]) -> Mention:
    """Draw how a request names a tool: by its name, by the parts of its name, or by the last part where no other tool
    or argument has it."""
    last = tool.parts[-1]
    shared = {part for other in tools if other is not tool for part in other.parts}
    shared |= {part for other in tools for argument in other.required + other.optional for part in argument.parts}
    draw = rng.random()
    if draw < 0.25 and len(tool.parts) > 1 and last not in shared:
        return Mention(tool, last, whole=False)
    return Mention(tool, tool.name if draw < 0.5 else " ".join(tool.parts), whole=True)


def argument_phrase(source: WordSource, argument: Argument, drawn: Value, bare: bool) -> str:
    """A phrase that states a value: under its argument's name, or `bare`. A comma ends a value whose end is not
    visible."""
    rng = source.rng
    text = value_text(drawn)
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


def argument_phrases(source: WordSource, arguments: dict[Argument, Value], bare: bool) -> str:
    """All values in one phrase, in random order."""
    phrases = [argument_phrase(source, argument, drawn, bare) for argument, drawn in arguments.items()]
    source.rng.shuffle(phrases)
    text = source.rng.choice([" and ", " ", " with "]).join(phrases).replace(", and", " and")
    return f"{source.rng.choice(LINKERS)} {text}".strip()


def filler(source: WordSource, most: int) -> list[str]:
    """Up to `most` meaningless words, some with punctuation: function words, and random words in one of three
    shares."""
    rng = source.rng
    share = rng.choice(FILLER_SHARES)
    words = [rng.choice(FUNCTION_WORDS) if rng.random() < share else source.draw() for _ in range(rng.randint(0, most))]
    return [word + rng.choice(FILLER_MARKS) if rng.random() < 0.15 else word for word in words]


def finish(rng: random.Random, text: str) -> str:
    """The text as a sentence, with normalised spaces and commas, an end mark or none, and sometimes a capital."""
    text = " ".join(text.split()).replace(" ,", ",").lstrip(" ,:-").rstrip(",")
    text = text.replace(",?", "?").replace(",.", ".").replace(",:", ":")
    if text[-1] not in "?.!":
        text += rng.choice(["", "", "?", ".", "!"])
    return text[0].upper() + text[1:] if rng.random() < 0.25 and text.split()[0] in FUNCTION_WORDS else text


def with_filler(source: WordSource, phrases: list[str], most: int) -> str:
    """The phrases in their order, with up to `most` filler words before, between and after them."""
    pieces = filler(source, most)
    for text in phrases:
        pieces += [text, *filler(source, most)]
    return finish(source.rng, " ".join(pieces or [source.draw()]))


def named_request(source: WordSource, tasks: list[str], offered: str, held_out: bool) -> str:
    """A request that names its tools, in a sentence frame or among filler."""
    rng = source.rng
    task = f" {rng.choice(SEQUELS)} ".join(tasks)
    if held_out:
        return finish(rng, rng.choice(HELD_OUT_FRAMES).format(task=task, values=offered))
    if rng.random() < 0.5:
        opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
        return finish(rng, rng.choice(ORDERS).format(task=task, values=offered, opening=opening, closing=closing))
    phrases = [text for text in (task, offered) if text]
    rng.shuffle(phrases)
    return with_filler(source, phrases, 3)


def open_request(source: WordSource, offered: str, hints: list[str]) -> str:
    """A request that states values among filler and names no tool. `hints` are words to place in it, such as the name
    of a field."""
    phrases = [*hints, offered]
    source.rng.shuffle(phrases)
    return with_filler(source, [text for text in phrases if text], 4)
