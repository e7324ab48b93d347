"""Requests to services: they name a tool by words of its name, and give values with or without the argument's name."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Json
from .fields import PAIRS, Field, flat
from .service_tools import ServiceTool
from .wording import CLOSINGS, HELD_OUT_FRAMES, OPENINGS, ORDERS, filler, finish
from .words import Bag

BEFORE = ("in", "at", "for", "from", "to", "with", "on", "as", "of", "by", "into", "", "", "", "")
QUOTES = ('"{}"', '"{}"', '"{}"', "'{}'", "`{}`")


@dataclass(frozen=True)
class Naming:
    """Words of a request that name a tool, and where in its name the policy begins to copy."""

    tool: ServiceTool
    text: str
    begin: int


def naming(rng: random.Random, tool: ServiceTool, tools: Sequence[ServiceTool]) -> Naming:
    """All words of the tool's name, or some that no other tool's name has together."""
    words = tool.words
    others = [set(other.words) for other in tools if other is not tool]
    draw = rng.random()
    if draw < 0.2:
        return Naming(tool, tool.name, 0)
    if draw < 0.5:
        return Naming(tool, " ".join(words), 0)
    kept = [word for word in words if rng.random() < 0.6]
    if not kept or any(set(kept) <= other for other in others):
        return Naming(tool, " ".join(words), 0)
    own = [word for word in kept if not any(word in other for other in others)]
    first = (own or kept)[0]
    if kept == words:
        first = words[0]
    if rng.random() < 0.15:
        rng.shuffle(kept)
    between = rng.choice([" ", " ", " ", " the ", " a ", " my "])
    return Naming(tool, between.join(kept), place(tool.name, first))


def place(name: str, word: str) -> int:
    """Where a word stands in a name; in camel case it may begin with a capital."""
    at = name.lower().find(word)
    while at > 0 and name[at - 1].isalpha() and not name[at].isupper():
        at = name.lower().find(word, at + 1)
    return max(at, 0)


def said_value(rng: random.Random, value: Json, most: float = 0.3) -> str:
    """A value as a request shows it: quoted when it has several words, and now and then otherwise."""
    text = value if isinstance(value, str) else json.dumps(value)
    spaced = " " in text and not text[0].isdigit()
    quotable = isinstance(value, str) and "'" not in text
    return rng.choice(QUOTES).format(text) if quotable and (spaced or rng.random() < most) else text


def said_list(rng: random.Random, values: Sequence[Json]) -> str:
    """Values in a row: `a, b and c`."""
    shown = [said_value(rng, value) for value in values]
    if len(shown) == 1:
        return shown[0]
    last = rng.choice([" and ", ", ", " and "])
    return ", ".join(shown[:-1]) + last + shown[-1]


def offer(bag: Bag, field: Field, value: Json, named: bool) -> str:
    """A phrase that gives a value, with the argument's name, a word of it, or without."""
    rng = bag.rng
    name = field.name if rng.random() < 0.3 else " ".join(field.words)
    if field.telling and rng.random() < 0.3:
        name = rng.choice(field.words)
    if field.shape == "flag":
        on = [f"with {name}", f"{name} on", f"{name}: true", f"{name}: yes", f"{name}"]
        off = [f"without {name}", f"{name} off", f"{name}: false", f"no {name}"]
        return rng.choice(on if value else off)
    if field.shape in ("object", "objects"):
        one = value[0] if isinstance(value, list) else value
        parts = [offer(bag, part, one[part.name], named=True) for part in field.parts]
        return f"{name} with {' and '.join(parts)}" if rng.random() < 0.6 else ", ".join(parts)
    text = said_list(rng, value) if isinstance(value, list) else said_value(rng, value, 0.1 if named else 0.3)
    if not named:
        return f"{rng.choice(BEFORE)} {text}".strip()
    draw = rng.random()
    before = f"{rng.choice(BEFORE)} " if rng.random() < 0.4 else ""
    if draw < 0.7:
        return f"{before}{name} {text}"
    return f"{name}: {text}" if draw < 0.82 else f"{name}={text}" if draw < 0.9 else f"{name} is {text}"


def offers(bag: Bag, tool: ServiceTool, values: dict[str, Json], free: bool) -> list[str]:
    """Phrases that give all values. `free`: the tool is named, so that what a value is for may follow from its kind."""
    rng = bag.rng
    fields = [each for each in tool.required + tool.optional if each.name in values]
    pair = [each for each in fields if each.telling and each.words[0] in {word for two in PAIRS for word in two}]
    if free and len(pair) == 2 and pair[0].kind == pair[1].kind and rng.random() < 0.7:
        order = sorted(pair, key=lambda each: [word for two in PAIRS for word in two].index(each.words[0]))
        begin, between = rng.choice(
            [("from ", " to "), ("", " to "), ("", " and "), ("", " into "), ("from ", " into ")]
        )
        first, second = (said_value(rng, values[each.name]) for each in order)
        rest = [offer(bag, each, values[each.name], named=True) for each in fields if each not in pair]
        return [*rest, f"{begin}{first}{between}{second}"][:: rng.choice([1, -1])]
    kinds = [each.kind for each in fields]
    bare = {each.name for each in fields if each.telling and kinds.count(each.kind) == 1 and rng.random() < 0.6}
    bare |= {each.name for each in fields if each.shape == "choice" and rng.random() < 0.5}
    if len(fields) == 1 and fields[0] in tool.required and rng.random() < 0.65:
        bare = {fields[0].name}
    phrases = [
        offer(
            bag,
            each,
            values[each.name],
            named=not (free and each.name in bare and each.shape in ("one", "many", "choice")),
        )
        for each in fields
    ]
    rng.shuffle(phrases)
    return phrases


def request(bag: Bag, tasks: Sequence[str], given: Sequence[str], hints: Sequence[str], held_out: bool) -> str:
    """The request: what to do and with what, in a frame or among filler."""
    rng = bag.rng
    link = rng.choice([" ", " ", " and ", ", ", " with "])
    task, values = " then ".join(tasks), link.join(given)
    if hints:
        task = " ".join([*hints, task]) if rng.random() < 0.5 else " ".join([task, *hints])
    if held_out and task:
        return finish(rng, rng.choice(HELD_OUT_FRAMES).format(task=task, given=values))
    if rng.random() < 0.6 and task:
        opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
        if rng.random() < 0.7:
            closing = ""
        return finish(rng, rng.choice(ORDERS).format(task=task, given=values, opening=opening, closing=closing))
    pieces = filler(bag, 3)
    phrases = [text for text in (task, *given) if text]
    if rng.random() < 0.3:
        rng.shuffle(phrases)
    for phrase in phrases:
        pieces += [phrase, *filler(bag, 2)]
    return finish(rng, " ".join(pieces or [bag.draw()]))


def shown_in(value: Json, text: str) -> bool:
    """Whether a text holds all of a value's texts and numbers."""
    return all(part in text for part in flat(value))
