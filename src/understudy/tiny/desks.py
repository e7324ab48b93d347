"""Desks: sets of invented tools around a few entities, whose results lead from one entity to the next."""

import json
import random
from dataclasses import dataclass

from .words import Bag, Value, identifier, number, phrase, value

HARD = 0.5
"""The share of training's desks whose tools often end alike, and of its tools with several fields: most misses were there."""


@dataclass(frozen=True)
class Argument:
    """An argument of a tool; a numeric one is written as a JSON number."""

    name: str
    numeric: bool = False

    @property
    def parts(self) -> list[str]:
        return self.name.split("_")

    @property
    def type_mark(self) -> str:
        return ": number" if self.numeric else ""

    def draw(self, bag: Bag, link: bool = False) -> Value:
        """A value for this argument; links between entities are short."""
        if self.numeric:
            return number(bag.rng)
        return (identifier(bag) if bag.rng.random() < 0.8 else phrase(bag)) if link else value(bag)


@dataclass(frozen=True)
class Tool:
    """A tool, and the shape of its results: named fields, or none for a bare string or number."""

    parts: tuple[str, ...]
    required: tuple[Argument, ...]
    optional: tuple[Argument, ...] = ()
    fields: tuple[Argument, ...] = ()
    links: tuple[Argument, ...] = ()

    @property
    def name(self) -> str:
        return "_".join(self.parts)

    @property
    def signature(self) -> str:
        """Its arguments as the chat template shows them: `order, amount: number, note?`."""
        required = [f"{argument.name}{argument.type_mark}" for argument in self.required]
        return ", ".join(required + [f"{argument.name}?{argument.type_mark}" for argument in self.optional])

    def fits(self, offered: dict[str, Value]) -> bool:
        """Whether it takes what is offered: all required arguments, and at least one if anything is offered."""
        return all(argument.name in offered for argument in self.required) and bool(self.required) == bool(offered)

    def schema(self) -> dict[str, object]:
        """The tool as chat templates and OpenAI's API write it."""
        properties = {
            argument.name: {"type": "integer" if argument.numeric else "string"}
            for argument in self.required + self.optional
        }
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [argument.name for argument in self.required],
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": " ".join(self.parts), "parameters": parameters},
        }


def draw_name(bag: Bag, entity: str, attribute: str) -> tuple[str, ...]:
    """A tool's name of one to three parts, most often entity_attribute."""
    draw = bag.rng.random()
    if draw < 0.52:
        return (entity, attribute)
    if draw < 0.62:
        return (attribute, entity)
    if draw < 0.68:
        return (bag.draw(), entity, attribute)
    if draw < 0.78:
        return (attribute,)
    if draw < 0.94:
        return (bag.draw(), attribute)
    return (bag.draw(), bag.draw(), attribute)


def draw_argument(bag: Bag, entity: str) -> Argument:
    """The argument that names an entity: mostly the entity's own word, with or without a second one."""
    draw = bag.rng.random()
    numeric = bag.rng.random() < 0.1
    if draw < 0.66:
        return Argument(entity, numeric)
    if draw < 0.76:
        return Argument(f"{entity}_id", numeric)
    if draw < 0.84:
        return Argument(f"{entity}_{bag.draw()}", numeric)
    return Argument("id" if draw < 0.88 else bag.draw(), numeric)


def draw_fields(bag: Bag, attribute: str, links: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The fields of a result: often one, named like the attribute; none for a bare string or number."""
    rng = bag.rng
    if not links and rng.random() < 0.18:
        return ()
    taken = attribute in [link.name for link in links]
    own = attribute if rng.random() < 0.6 and not taken else ("result" if rng.random() < 0.35 else bag.draw())
    count = rng.choice([0, 0, 0, 1, 2]) if links else rng.choice([1, 1, 1, 1, 2, 3])
    if not bag.held_out and rng.random() < HARD:
        count = rng.choice([2, 3])
    plain = [Argument(own if index == 0 else bag.draw(), rng.random() < 0.15) for index in range(count)]
    fields = plain + list(links)
    rng.shuffle(fields)
    return tuple(fields)


def draw_desk(bag: Bag) -> tuple[Tool, ...]:
    """Two to six tools (one or up to eight, now and then) around one to three entities."""
    rng = bag.rng
    size = rng.randint(1 if rng.random() < 0.2 else 2, 8 if rng.random() < 0.15 else 6)
    words = [bag.draw() for _ in range(rng.choices([1, 2, 3], [0.35, 0.55, 0.1])[0])]
    keys = [draw_argument(bag, word) for word in words]
    if len({key.name for key in keys}) < len(keys):
        keys = [Argument(word, key.numeric) for word, key in zip(words, keys, strict=True)]
    alike = not bag.held_out and rng.random() < HARD
    tools: list[Tool] = []
    for index in range(size):
        chosen = index if index < len(keys) else rng.choices(range(len(keys)), [3, 2, 1][: len(keys)])[0]
        ends = [tool.parts[-1] for tool in tools if alike and tool.parts[-1] not in words]
        tools.append(draw_tool(bag, words, keys, chosen, ends, linked=index == 0 or rng.random() < 0.35))
    tools = list({tool.name: tool for tool in tools}.values())
    rng.shuffle(tools)
    return tuple(tools)


def draw_tool(bag: Bag, words: list[str], keys: list[Argument], chosen: int, ends: list[str], linked: bool) -> Tool:
    """A tool about one entity, ending like others or not; a linked one returns the argument of another entity's tools."""
    rng = bag.rng
    attribute = rng.choice(ends) if ends and rng.random() < 0.6 else bag.draw()
    links: tuple[Argument, ...] = ()
    others = [index for index in range(len(keys)) if index != chosen]
    if linked and others:
        target = rng.choice(others)
        links = (keys[target],)
        attribute = words[target] if rng.random() < 0.6 else attribute
    entity = words[chosen] if rng.random() < 0.85 else bag.draw()
    required = [keys[chosen]]
    optional: list[Argument] = []
    if rng.random() < 0.12:
        extra = [Argument(bag.draw(), rng.random() < 0.2) for _ in range(rng.choice([1, 1, 2]))]
        (required if rng.random() < 0.7 else optional).extend(extra)
    elif rng.random() < 0.04:
        required = []
    parts = draw_name(bag, entity, attribute)
    if parts == (attribute,) and attribute in words:
        parts = (bag.draw(), attribute)  # alone, it could be meant as the argument
    fields = draw_fields(bag, attribute, links)
    return Tool(parts, tuple(required), tuple(optional), fields, links)


def draw_result(bag: Bag, tool: Tool) -> dict[str, Value] | Value:
    """What a call of the tool returns."""
    if not tool.fields:
        return number(bag.rng) if bag.rng.random() < 0.3 else value(bag)
    return {field.name: field.draw(bag, link=field in tool.links) for field in tool.fields}


def render_result(rng: random.Random, result: dict[str, Value] | Value) -> str:
    """The text of a tool message, in one of the ways in which frameworks write JSON."""
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result)
    draw = rng.random()
    if draw < 0.75:
        return json.dumps(result)
    return json.dumps(result, separators=(",", ":")) if draw < 0.88 else json.dumps(result, indent=2)
