"""Services: sets of up to sixteen invented tools with arguments of all types."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

from collections.abc import Sequence
from dataclasses import dataclass

from offbook.base.types import Json
from offbook.base.types import Tool as ToolSchema

from .fields import Field, draw_field, draw_optional, draw_pair, joined, object_schema, words_of
from .words import WordSource


@dataclass(frozen=True)
class ServiceTool:
    """A tool. The words of its name are joined by `_` or `-`, or in camel case."""

    name: str
    required: tuple[Field, ...]
    optional: tuple[Field, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of its name, in lower case."""
        return words_of(self.name)

    def schema(self) -> ToolSchema:
        """The tool in the format of OpenAI's API, which chat templates take."""
        function = {
            "name": self.name,
            "description": " ".join(self.words),
            "parameters": object_schema(self.required, self.optional),
        }
        return {"type": "function", "function": function}


def shown_type(schema: Json) -> str:
    """A JSON Schema's type as the chat template shows it; empty for a string.

    >>> shown_type({"type": "array", "items": {"enum": ["a", "b"]}})
    '(a|b)[]'
    """
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
    """A tool's arguments as the chat template shows them.

    >>> signature({"properties": {"path": {"type": "string"}, "sort": {"enum": ["name", "size"]}}, "required": ["path"]})
    'path, sort?: name|size'
    """
    required: list[str] = parameters["required"]
    shown: list[str] = []
    for name, schema in parameters["properties"].items():
        kind = shown_type(schema)
        shown.append(name + ("" if name in required else "?") + (f": {kind}" if kind else ""))
    return ", ".join(shown)


@dataclass(frozen=True)
class Size:
    """The size of a service: its number of tools, the most arguments that one requires, whether there are optional
    arguments, lists, flags, choices and objects (`shaped`), and whether there are many of these (`rich`)."""

    tools: int
    required: int
    shaped: bool
    rich: bool = False


def size_at(source: WordSource, level: float, tools: int | None = None) -> Size:
    """Draw the size of a service. `level` is the progress of the widening, 0 to 1; above 1, more arguments
    are lists and objects. `tools` fixes the number of tools."""
    rng = source.rng
    draw = rng.random()
    most = rng.randint(1, 4) if draw < 0.45 else rng.randint(5, 9) if draw < 0.75 else rng.randint(10, 16)
    return Size(
        tools or min(most, 3 + int(13 * level)),
        1 + int(2.99 * min(1.0, level * rng.random() ** 0.6)),
        rng.random() < level,
        level > 1,
    )


def draw_service(source: WordSource, size: Size) -> tuple[ServiceTool, ...]:
    """Tools that share words of their names, and arguments."""
    rng = source.rng
    style = rng.choices(["_", "-", "camel"], [0.72, 0.18, 0.1])[0]
    field_style = rng.choices(["_", "camel"], [0.8, 0.2])[0]
    prefix = [source.draw()] if rng.random() < 0.2 else []
    verbs = [source.draw() for _ in range(rng.randint(1, 4))]
    nouns = [source.draw() for _ in range(rng.randint(1, 4))]
    taken: set[str] = set()
    shared = [draw_field(source, field_style, taken, plain=True) for _ in range(rng.choice([1, 1, 2]))]
    tools: dict[str, ServiceTool] = {}
    while len(tools) < size.tools:
        words = draw_words(source, verbs, nouns)
        name = joined([*prefix, *words], style)
        required, names = draw_required(source, field_style, shared, size)
        count = rng.choice([0, 0, 0, 1, 1, 2, 3]) if size.shaped else 0
        optional = tuple(draw_optional(source, field_style, names, size.rich) for _ in range(count))
        tools[name] = ServiceTool(name, required, optional)
    listed = list(tools.values())
    rng.shuffle(listed)
    return tuple(listed)


def draw_words(source: WordSource, verbs: Sequence[str], nouns: Sequence[str]) -> list[str]:
    """The words of a tool's name: a verb and a noun, shared with other tools or new, sometimes with more words."""
    rng = source.rng
    verb = rng.choice(verbs) if rng.random() < 0.5 else source.draw()
    noun = rng.choice(nouns) if rng.random() < 0.45 else source.draw()
    draw = rng.random()
    if draw < 0.15:
        return [source.draw()]
    if draw < 0.7:
        return [verb, noun]
    return [verb, source.draw(), noun] if draw < 0.92 else [verb, noun, source.draw(), source.draw()]


def draw_required(
    source: WordSource, style: str, shared: Sequence[Field], size: Size
) -> tuple[tuple[Field, ...], set[str]]:
    """The arguments that a tool requires, and the names that its optional arguments cannot have."""
    rng = source.rng
    if size.shaped and rng.random() < 0.06:
        return (), set()
    count = rng.randint(1, size.required)
    names = {field.name for field in shared}
    if count > 1 and rng.random() < 0.4:
        chosen = draw_pair(source, style, names)[:count]
        if len(chosen) == 2 and count > 2:
            chosen = (*chosen, draw_field(source, style, names, plain=True))
        if chosen:
            return tuple(rng.sample(chosen, len(chosen)) if rng.random() < 0.2 else chosen), names
    chosen = (rng.choice(shared),) if rng.random() < (0.35 if size.rich else 0.6) else ()
    while len(chosen) < count:
        chosen = (*chosen, draw_field(source, style, names, plain=not size.shaped, rich=size.rich))
    unique = {field.name: field for field in chosen}
    return tuple(unique.values()), names
