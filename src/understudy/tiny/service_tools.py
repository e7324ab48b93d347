"""Services: up to sixteen invented tools with arguments of all types, as a request finds them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Json
from ..types import Tool as ToolSchema
from .fields import Field, draw_field, draw_optional, draw_pair, joined, object_schema, words_of
from .words import Bag


@dataclass(frozen=True)
class ServiceTool:
    """A tool; the words of its name are joined by `_`, by `-`, or by capitals."""

    name: str
    required: tuple[Field, ...]
    optional: tuple[Field, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of its name, in small letters."""
        return words_of(self.name)

    def schema(self) -> ToolSchema:
        """The tool as chat templates and OpenAI's API write it."""
        function = {
            "name": self.name,
            "description": " ".join(self.words),
            "parameters": object_schema(self.required, self.optional),
        }
        return {"type": "function", "function": function}


def shown_type(schema: Json) -> str:
    """A schema's type as the chat template shows it; a string's is empty."""
    if "enum" in schema:
        return "|".join(schema["enum"])
    match schema.get("type"):
        case "boolean":
            return "bool"
        case "number" | "integer":
            return "number"
        case "array":
            inner = shown_type(schema["items"])
            return (f"({inner})" if "|" in inner and "{" not in inner else inner) + "[]"
        case "object":
            return "{" + signature(schema) + "}"
        case _:
            return ""


def signature(parameters: Json) -> str:
    """A tool's arguments as the chat template shows them: `path, sort?: name|size`."""
    required: list[str] = parameters["required"]
    shown: list[str] = []
    for name, schema in parameters["properties"].items():
        kind = shown_type(schema)
        shown.append(name + ("" if name in required else "?") + (f": {kind}" if kind else ""))
    return ", ".join(shown)


@dataclass(frozen=True)
class Size:
    """How many tools at most, how many arguments they require at most, and whether any are optional or have lists,
    flags, choices and objects."""

    tools: int
    required: int
    shaped: bool


def size_at(bag: Bag, level: float, tools: int | None = None) -> Size:
    """The size of a service when `level` of the widening is done, 0 to 1; above 1, more tools take several arguments.
    `tools`: this many."""
    rng = bag.rng
    draw = rng.random()
    most = rng.randint(1, 4) if draw < 0.45 else rng.randint(5, 9) if draw < 0.75 else rng.randint(10, 16)
    return Size(
        tools or min(most, 3 + int(13 * level)),
        1 + int(2.99 * min(1.0, level * rng.random() ** 0.6)),
        rng.random() < level,
    )


def draw_service(bag: Bag, size: Size) -> tuple[ServiceTool, ...]:
    """Tools that share words of their names, and arguments."""
    rng = bag.rng
    style = rng.choices(["_", "-", "camel"], [0.72, 0.18, 0.1])[0]
    field_style = rng.choices(["_", "camel"], [0.8, 0.2])[0]
    prefix = [bag.draw()] if rng.random() < 0.2 else []
    verbs = [bag.draw() for _ in range(rng.randint(1, 4))]
    nouns = [bag.draw() for _ in range(rng.randint(1, 4))]
    taken: set[str] = set()
    shared = [draw_field(bag, field_style, taken, plain=True) for _ in range(rng.choice([1, 1, 2]))]
    tools: dict[str, ServiceTool] = {}
    while len(tools) < size.tools:
        words = draw_words(bag, verbs, nouns)
        name = joined([*prefix, *words], style)
        required, names = draw_required(bag, field_style, shared, size)
        count = rng.choice([0, 0, 0, 1, 1, 2, 3]) if size.shaped else 0
        optional = tuple(draw_optional(bag, field_style, names) for _ in range(count))
        tools[name] = ServiceTool(name, required, optional)
    listed = list(tools.values())
    rng.shuffle(listed)
    return tuple(listed)


def draw_words(bag: Bag, verbs: Sequence[str], nouns: Sequence[str]) -> list[str]:
    """The words of a name: a verb and a noun, either shared with other tools or its own."""
    rng = bag.rng
    verb = rng.choice(verbs) if rng.random() < 0.5 else bag.draw()
    noun = rng.choice(nouns) if rng.random() < 0.45 else bag.draw()
    draw = rng.random()
    if draw < 0.15:
        return [bag.draw()]
    if draw < 0.7:
        return [verb, noun]
    return [verb, bag.draw(), noun] if draw < 0.92 else [verb, noun, bag.draw(), bag.draw()]


def draw_required(bag: Bag, style: str, shared: Sequence[Field], size: Size) -> tuple[tuple[Field, ...], set[str]]:
    """The arguments that a tool requires, and the names that are taken by them."""
    rng = bag.rng
    if size.shaped and rng.random() < 0.06:
        return (), set()
    count = rng.randint(1, size.required)
    names = {each.name for each in shared}
    if count > 1 and rng.random() < 0.3:
        chosen = draw_pair(bag, style, names)
        if chosen and count > 2:
            chosen = (*chosen, draw_field(bag, style, names, plain=True))
        if chosen:
            return tuple(rng.sample(chosen, len(chosen)) if rng.random() < 0.2 else chosen), names
    chosen = (rng.choice(shared),) if rng.random() < 0.6 else (draw_field(bag, style, names, plain=not size.shaped),)
    while len(chosen) < count:
        chosen = (*chosen, draw_field(bag, style, names, plain=not size.shaped))
    unique = {each.name: each for each in chosen}
    return tuple(unique.values()), names
