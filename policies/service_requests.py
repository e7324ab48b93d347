"""Requests to services. A request names a tool by words of its name, and states values with or without the argument's
name."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offbook.base.types import Json

from .fields import PAIRS, Field, flat
from .service_tools import ServiceTool
from .wording import CLOSINGS, HELD_OUT_FRAMES, OPENINGS, ORDERS, filler, finish
from .words import WordSource

BEFORE = ("in", "at", "for", "from", "to", "with", "on", "as", "of", "by", "into", "", "", "", "")
PAIR_WORDS = [word for pair in PAIRS for word in pair]
LINKS = (" ", " ", " and ", ", ", " with ")
THEN = (
    " then ",
    ", then ",
    ". Then ",
    "; ",
    " and then ",
    ". Next, ",
    ". After that, ",
    ", and afterwards ",
    ". Also ",
)
"""What stands between two clauses of a request for several calls."""
QUOTES = ('"{}"', '"{}"', '"{}"', "'{}'", "`{}`")


@dataclass(frozen=True)
class Naming:
    """Words of a request that name a tool. `begin` is the offset in the tool's name where the policy starts to copy
    it."""

    tool: ServiceTool
    text: str
    begin: int


def naming(rng: random.Random, tool: ServiceTool, tools: Sequence[ServiceTool]) -> Naming:
    """Draw how a request names `tool`: by all words of its name, or by some that no other tool's name has together."""
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
    return Naming(tool, between.join(kept), name_offset(tool.name, first))


def name_offset(name: str, word: str) -> int:
    """The offset of a word in a name, where the word starts with a capital (camel case) or follows no letter.

    >>> name_offset("find_old_boats", "old"), name_offset("findOldBoats", "old")
    (5, 4)
    """
    begin = name.lower().find(word)
    while begin > 0 and name[begin - 1].isalpha() and not name[begin].isupper():
        begin = name.lower().find(word, begin + 1)
    return max(begin, 0)


def value_phrase(rng: random.Random, value: Json, most: float = 0.3) -> str:
    """A value as a request states it. Text is quoted with probability `most`; always if it has several words and starts
    with no digit; never if it contains a single quote."""
    text = value if isinstance(value, str) else json.dumps(value)
    spaced = " " in text and not text[0].isdigit()
    quotable = isinstance(value, str) and "'" not in text
    return rng.choice(QUOTES).format(text) if quotable and (spaced or rng.random() < most) else text


def list_phrase(rng: random.Random, values: Sequence[Json]) -> str:
    """Values in a row: `a, b and c`."""
    shown = [value_phrase(rng, value) for value in values]
    if len(shown) == 1:
        return shown[0]
    last = rng.choice([" and ", ", ", " and "])
    return ", ".join(shown[:-1]) + last + shown[-1]


def argument_phrase(
    source: WordSource, field: Field, value: Json, named: bool, others: Collection[str] = frozenset()
) -> str:
    """A phrase that states a value. `named`: it has the argument's name, or one word of it; else the value alone.
    `others` are the words of the other arguments' names, which would not tell this one."""
    rng = source.rng
    name = field.name if rng.random() < 0.3 else " ".join(field.words)
    own = [word for word in field.words if word not in others]
    if field.telling and own and rng.random() < 0.3:
        name = rng.choice(own)
    if field.shape == "flag":
        on = [f"with {name}", f"{name} on", f"{name}: true", f"{name}: yes", f"{name}"]
        off = [f"without {name}", f"{name} off", f"{name}: false", f"no {name}"]
        return rng.choice(on if value else off)
    if field.shape in ("object", "objects"):
        between = rng.choice([" and ", " and ", ", "])
        items = [
            between.join(argument_phrase(source, part, one[part.name], named=True) for part in field.parts)
            for one in (value if isinstance(value, list) else [value])
        ]
        text = rng.choice(["; ", ", and ", " and "]).join(items)
        return f"{name} with {text}" if rng.random() < 0.6 else text
    text = list_phrase(rng, value) if isinstance(value, list) else value_phrase(rng, value, 0.1 if named else 0.3)
    if not named:
        return f"{rng.choice(BEFORE)} {text}".strip()
    draw = rng.random()
    before = f"{rng.choice(BEFORE)} " if rng.random() < 0.4 else ""
    if draw < 0.7:
        return f"{before}{name} {text}"
    return f"{name}: {text}" if draw < 0.82 else f"{name}={text}" if draw < 0.9 else f"{name} is {text}"


def paired(fields: Sequence[Field]) -> Sequence[Field]:
    """The two arguments of one kind whose names end alike, such as `from_zone` and `to_zone`; empty if there are none.

    A request may state their values without the names, the first one first."""
    telling = [field for field in fields if field.telling and field.shape == "one" and len(field.words) > 1]
    for first in telling:
        pair = [field for field in telling if (field.kind, field.words[1:]) == (first.kind, first.words[1:])]
        if len(pair) == 2:
            return pair
    return []


def stated_order(pair: Sequence[Field]) -> bool:
    """Whether the names of a pair tell which is first, as `from` and `to` do; else it is the order of the signature."""
    return all(field.words[0] in PAIR_WORDS for field in pair)


def argument_phrases(source: WordSource, tool: ServiceTool, values: dict[str, Json], free: bool) -> list[str]:
    """One phrase per value, in random order.

    `free`: the request names the tool, so a phrase may leave out the argument's name where the kind of value shows
    which argument it is for."""
    rng = source.rng
    fields = [field for field in tool.required + tool.optional if field.name in values]
    others = {
        field.name: {word for other in tool.required + tool.optional if other is not field for word in other.words}
        for field in fields
    }
    pair = paired(fields)
    if free and pair and rng.random() < 0.7:
        order = sorted(pair, key=lambda field: PAIR_WORDS.index(field.words[0])) if stated_order(pair) else pair
        begin, between = rng.choice(
            [("from ", " to "), ("", " to "), ("", " and "), ("", " into "), ("from ", " into ")]
        )
        first, second = (value_phrase(rng, values[field.name]) for field in order)
        rest = [
            argument_phrase(source, field, values[field.name], named=True, others=others[field.name])
            for field in fields
            if field not in pair
        ]
        return [*rest, f"{begin}{first}{between}{second}"][:: rng.choice([1, -1])]
    kinds = [field.kind for field in fields]
    bare = {field.name for field in fields if field.telling and kinds.count(field.kind) == 1 and rng.random() < 0.6}
    bare |= {field.name for field in fields if field.shape == "choice" and rng.random() < 0.5}
    if len(fields) == 1 and fields[0] in tool.required and rng.random() < 0.65:
        bare = {fields[0].name}
    phrases = [
        argument_phrase(
            source,
            field,
            values[field.name],
            named=not (free and field.name in bare and field.shape in ("one", "many", "choice")),
            others=others[field.name],
        )
        for field in fields
    ]
    rng.shuffle(phrases)
    return phrases


def clause(source: WordSource, mention: Naming, phrases: Sequence[str]) -> str:
    """A task of several: what names its tool, and its values."""
    return f"{mention.text} {source.rng.choice(LINKS).join(phrases)}".strip()


def request(
    source: WordSource, tasks: Sequence[str], phrases: Sequence[str], hints: Sequence[str], held_out: bool
) -> str:
    """A request as one text: the task and the phrases in a sentence frame, or in random order among filler. `hints` are
    words to place beside the task."""
    rng = source.rng
    between = " then " if phrases or hints else rng.choice(THEN)
    task, values = between.join(tasks), rng.choice(LINKS).join(phrases)
    if hints:
        task = " ".join([*hints, task]) if rng.random() < 0.5 else " ".join([task, *hints])
    if held_out and task:
        return finish(rng, rng.choice(HELD_OUT_FRAMES).format(task=task, values=values))
    if rng.random() < 0.6 and task:
        opening, closing = rng.choice(OPENINGS), rng.choice(CLOSINGS)
        if rng.random() < 0.7:
            closing = ""
        return finish(rng, rng.choice(ORDERS).format(task=task, values=values, opening=opening, closing=closing))
    pieces = filler(source, 3)
    parts = [text for text in (task, *phrases) if text]
    if rng.random() < 0.3:
        rng.shuffle(parts)
    for phrase in parts:
        pieces += [phrase, *filler(source, 2)]
    return finish(rng, " ".join(pieces or [source.draw()]))


def contains_value(value: Json, text: str) -> bool:
    """Whether a text contains all strings and numbers of a value, as `flat` lists them."""
    return all(part in text for part in flat(value))
