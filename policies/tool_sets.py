"""Sets of invented tools about one to three entities. A result of one tool can hold an argument of another tool."""

import json
import random
from dataclasses import dataclass

from .words import Value, WordSource, identifier, number, phrase, value

HARD_SHARE = 0.5
"""Share of harder cases in training: tool sets in which many names end in the same word, and tools that return several
fields."""


@dataclass(frozen=True)
class Argument:
    """An argument of a tool. A numeric one is written as a JSON number."""

    name: str
    numeric: bool = False

    @property
    def parts(self) -> list[str]:
        """The words of its name."""
        return self.name.split("_")

    @property
    def type_mark(self) -> str:
        """Its type as the chat template shows it; empty for a string."""
        return ": number" if self.numeric else ""

    def draw(self, source: WordSource, link: bool = False) -> Value:
        """Draw a value. `link`: the value identifies an entity, so it is short."""
        if self.numeric:
            return number(source.rng)
        return (identifier(source) if source.rng.random() < 0.8 else phrase(source)) if link else value(source)


@dataclass(frozen=True)
class Tool:
    """A tool and the shape of its results. `fields` are the fields of a result, none for a bare string or number.
    `links` are those fields that other tools take as arguments."""

    parts: tuple[str, ...]
    required: tuple[Argument, ...]
    optional: tuple[Argument, ...] = ()
    fields: tuple[Argument, ...] = ()
    links: tuple[Argument, ...] = ()

    @property
    def name(self) -> str:
        """The parts of its name, joined by `_`."""
        return "_".join(self.parts)

    @property
    def signature(self) -> str:
        """Its arguments as the chat template shows them.

        >>> Tool(("send",), (Argument("order"), Argument("amount", numeric=True)), (Argument("note"),)).signature
        'order, amount: number, note?'
        """
        required = [f"{argument.name}{argument.type_mark}" for argument in self.required]
        return ", ".join(required + [f"{argument.name}?{argument.type_mark}" for argument in self.optional])

    def fits(self, offered: dict[str, Value]) -> bool:
        """Whether `offered` has all required arguments. A tool without required arguments fits only when nothing is
        offered."""
        return all(argument.name in offered for argument in self.required) and bool(self.required) == bool(offered)

    def schema(self) -> dict[str, object]:
        """The tool in the format of OpenAI's API, which chat templates take."""
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


def draw_name(source: WordSource, entity: str, attribute: str) -> tuple[str, ...]:
    """The one to three parts of a tool's name, most often (entity, attribute)."""
    draw = source.rng.random()
    if draw < 0.52:
        return (entity, attribute)
    if draw < 0.62:
        return (attribute, entity)
    if draw < 0.68:
        return (source.draw(), entity, attribute)
    if draw < 0.78:
        return (attribute,)
    if draw < 0.94:
        return (source.draw(), attribute)
    return (source.draw(), source.draw(), attribute)


def draw_argument(source: WordSource, entity: str) -> Argument:
    """The argument that identifies an entity: mostly the entity's own word, sometimes with a second word."""
    draw = source.rng.random()
    numeric = source.rng.random() < 0.1
    if draw < 0.66:
        return Argument(entity, numeric)
    if draw < 0.76:
        return Argument(f"{entity}_id", numeric)
    if draw < 0.84:
        return Argument(f"{entity}_{source.draw()}", numeric)
    return Argument("id" if draw < 0.88 else source.draw(), numeric)


def draw_fields(source: WordSource, attribute: str, links: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The fields of a result. Often there is one, named like the attribute; a bare string or number has none."""
    rng = source.rng
    if not links and rng.random() < 0.18:
        return ()
    taken = attribute in [link.name for link in links]
    own = attribute if rng.random() < 0.6 and not taken else ("result" if rng.random() < 0.35 else source.draw())
    count = rng.choice([0, 0, 0, 1, 2]) if links else rng.choice([1, 1, 1, 1, 2, 3])
    if not source.held_out and rng.random() < HARD_SHARE:
        count = rng.choice([2, 3])
    plain = [Argument(own if index == 0 else source.draw(), rng.random() < 0.15) for index in range(count)]
    fields = plain + list(links)
    rng.shuffle(fields)
    return tuple(fields)


def draw_tool_set(source: WordSource) -> tuple[Tool, ...]:
    """A set of two to six tools about one to three entities. Some sets have one tool, or up to eight."""
    rng = source.rng
    size = rng.randint(1 if rng.random() < 0.2 else 2, 8 if rng.random() < 0.15 else 6)
    words = [source.draw() for _ in range(rng.choices([1, 2, 3], [0.35, 0.55, 0.1])[0])]
    keys = [draw_argument(source, word) for word in words]
    if len({key.name for key in keys}) < len(keys):
        keys = [Argument(word, key.numeric) for word, key in zip(words, keys, strict=True)]
    alike = not source.held_out and rng.random() < HARD_SHARE
    tools: list[Tool] = []
    for index in range(size):
        chosen = index if index < len(keys) else rng.choices(range(len(keys)), [3, 2, 1][: len(keys)])[0]
        ends = [tool.parts[-1] for tool in tools if alike and tool.parts[-1] not in words]
        tools.append(draw_tool(source, words, keys, chosen, ends, linked=index == 0 or rng.random() < 0.35))
    tools = list({tool.name: tool for tool in tools}.values())
    rng.shuffle(tools)
    return tuple(tools)


def draw_tool(
    source: WordSource, words: list[str], keys: list[Argument], chosen: int, ends: list[str], linked: bool
) -> Tool:
    """A tool about the entity `words[chosen]`, whose argument is `keys[chosen]`.

    `ends` are last words of other tools' names, which its name may share. `linked`: its result holds the argument of
    another entity's tools."""
    rng = source.rng
    attribute = rng.choice(ends) if ends and rng.random() < 0.6 else source.draw()
    links: tuple[Argument, ...] = ()
    others = [index for index in range(len(keys)) if index != chosen]
    if linked and others:
        target = rng.choice(others)
        links = (keys[target],)
        attribute = words[target] if rng.random() < 0.6 else attribute
    entity = words[chosen] if rng.random() < 0.85 else source.draw()
    required = [keys[chosen]]
    optional: list[Argument] = []
    if rng.random() < 0.12:
        extra = [Argument(source.draw(), rng.random() < 0.2) for _ in range(rng.choice([1, 1, 2]))]
        (required if rng.random() < 0.7 else optional).extend(extra)
    elif rng.random() < 0.04:
        required = []
    parts = draw_name(source, entity, attribute)
    if parts == (attribute,) and attribute in words:
        parts = (source.draw(), attribute)  # a name of this one word would look like the argument
    fields = draw_fields(source, attribute, links)
    return Tool(parts, tuple(required), tuple(optional), fields, links)


def draw_result(source: WordSource, tool: Tool) -> dict[str, Value] | Value:
    """The result of a call: a value per field, or a bare value for a tool without fields."""
    if not tool.fields:
        return number(source.rng) if source.rng.random() < 0.3 else value(source)
    return {field.name: field.draw(source, link=field in tool.links) for field in tool.fields}


def render_result(rng: random.Random, result: dict[str, Value] | Value) -> str:
    """The text of a tool message, in one of the formats in which frameworks write JSON."""
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result)
    draw = rng.random()
    if draw < 0.75:
        return json.dumps(result)
    return json.dumps(result, separators=(",", ":")) if draw < 0.88 else json.dumps(result, indent=2)
