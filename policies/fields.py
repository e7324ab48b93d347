"""Arguments of services' tools: strings of several kinds (paths, dates, addresses), numbers, lists, flags, choices and
objects."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from offbook.base.types import Json

from .words import WordSource, number, phrase, title

Shape = Literal["one", "many", "flag", "choice", "object", "objects"]
"""One value, a list of values, a boolean, one of an enum, an object, or a list of objects."""
UNITS = ("km", "kg", "ms", "GB", "%", "h", "m", "min", "EUR", "px", "s")
ENDINGS = ("txt", "md", "py", "json", "csv", "log", "yaml", "png", "toml", "pdf")
DOMAINS = ("com", "org", "net", "example", "io", "dev")
PAIRS = (("from", "to"), ("old", "new"), ("first", "second"), ("start", "end"), ("lower", "upper"), ("left", "right"))
"""First words of the names of two arguments of one kind, in the order in which requests state their values."""


def path(source: WordSource) -> str:
    """A file or folder, absolute or relative."""
    rng = source.rng
    steps = [step(source) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    start = rng.choice(["/", "/", "/", "", "", "./", "~/", "../"])
    if rng.random() < 0.6:
        steps[-1] += f".{rng.choice(ENDINGS)}"
    elif len(steps) == 1 and not start:
        start = "/"
    return start + "/".join(steps)


def step(source: WordSource) -> str:
    """One name between the slashes of a path."""
    draw = source.rng.random()
    if draw < 0.6:
        return source.draw()
    if draw < 0.75:
        return f"{source.draw()}{source.rng.choice('-_')}{source.draw()}"
    return (
        f"{source.draw()}{source.rng.choice(['-', '_', ''])}{number(source.rng)}"
        if draw < 0.9
        else source.draw().capitalize()
    )


def url(source: WordSource) -> str:
    """A URL with a host, sometimes a path and a query."""
    rng = source.rng
    host = f"{rng.choice(['https://', 'https://', 'http://'])}{source.draw()}.{rng.choice(DOMAINS)}"
    tail = "".join(f"/{step(source)}" for _ in range(rng.choice([0, 1, 1, 2])))
    return host + tail + (f"?{source.draw()}={number(rng)}" if rng.random() < 0.2 else "")


def email(source: WordSource) -> str:
    """An e-mail address."""
    first = source.draw() + (f".{source.draw()}" if source.rng.random() < 0.3 else "")
    return f"{first}@{source.draw()}.{source.rng.choice(DOMAINS)}"


def date(source: WordSource) -> str:
    """An ISO date."""
    return f"20{source.rng.randint(10, 39)}-{source.rng.randint(1, 12):02}-{source.rng.randint(1, 28):02}"


def clock(source: WordSource) -> str:
    """A time of day, sometimes with seconds."""
    text = f"{source.rng.randint(0, 23):02}:{source.rng.randint(0, 59):02}"
    return text + (f":{source.rng.randint(0, 59):02}" if source.rng.random() < 0.15 else "")


def instant(source: WordSource) -> str:
    """An ISO date and time."""
    return date(source) + "T" + clock(source) + source.rng.choice(["", "", "Z"])


def zone(source: WordSource) -> str:
    """A time zone like `Brova/Tel_Mek`."""
    names = [source.draw().capitalize() for _ in range(source.rng.choice([1, 1, 1, 2]))]
    return f"{source.draw().capitalize()}/{'_'.join(names)}"


def identifier(source: WordSource) -> str:
    """An id: letters and digits with punctuation between them."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.25:
        return f"{source.draw()}-{number(rng)}"
    if draw < 0.4:
        return f"#{number(rng)}"
    if draw < 0.55:
        return "".join(rng.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(rng.choice([2, 3]))) + f"-{number(rng)}"
    if draw < 0.7:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.choice([6, 7, 8])))
    return f"{source.draw()}_{source.draw()}" if draw < 0.85 else f"{source.draw()}:{number(rng)}"


def branch(source: WordSource) -> str:
    """A name as version control writes it: `brova/tel-mek`, `v1.2.0`, `brova~2`, or a word."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.4:
        return f"{source.draw()}/{source.draw()}" + (f"-{source.draw()}" if rng.random() < 0.5 else "")
    if draw < 0.6:
        return f"v{rng.randint(0, 9)}.{rng.randint(0, 20)}" + rng.choice(["", f".{rng.randint(0, 9)}"])
    return (
        f"{source.draw()}-{source.draw()}"
        if draw < 0.8
        else source.draw() + rng.choice(["", "", "~1", f"~{rng.randint(2, 9)}"])
    )


def pattern(source: WordSource) -> str:
    """A glob pattern of file names."""
    return source.rng.choice(["*.", "**/*.", f"{source.draw()}/*.", f"{source.draw()}*."]) + source.rng.choice(ENDINGS)


def measure(source: WordSource) -> str:
    """A number with its unit."""
    amount = (
        number(source.rng) if source.rng.random() < 0.7 else f"{source.rng.randint(0, 99)}.{source.rng.randint(0, 9)}"
    )
    return (
        f"{amount} {source.rng.choice(UNITS)}" if source.rng.random() < 0.8 else f"{amount}{source.rng.choice(UNITS)}"
    )


def text(source: WordSource) -> str:
    """Two to five words, sometimes with punctuation after the first."""
    words = [source.draw() for _ in range(source.rng.choice([2, 2, 3, 3, 4, 5]))]
    if source.rng.random() < 0.3:
        words[0] = words[0].capitalize()
    if source.rng.random() < 0.25:
        words[0] += source.rng.choice([":", ",", "!", " -", " =", "."])
    return " ".join(words)


def amount(source: WordSource) -> Json:
    """A number, sometimes negative or with a decimal."""
    draw = source.rng.random()
    if draw < 0.85:
        return number(source.rng)
    return -source.rng.randint(1, 99) if draw < 0.9 else source.rng.randint(1, 999) / 10


KINDS: dict[str, tuple[tuple[str, ...], Callable[[WordSource], Json]]] = {
    "path": (("path", "file", "folder", "directory", "filename"), path),
    "url": (("url", "link", "address", "page", "site"), url),
    "email": (("email", "recipient", "sender", "contact"), email),
    "date": (("date", "day", "deadline", "birthday"), date),
    "time": (("time", "hour", "clock"), clock),
    "instant": (("instant", "moment", "since", "until"), instant),
    "zone": (("zone", "region", "area", "place"), zone),
    "id": (("id", "key", "code", "ticket"), identifier),
    "branch": (("branch", "tag", "version", "revision", "release"), branch),
    "pattern": (("pattern", "glob", "filter"), pattern),
    "measure": (("size", "length", "weight", "duration"), measure),
    "text": (("message", "note", "content", "comment", "remark"), text),
    "name": (("name", "title", "label", "city"), title),
    "word": (("query", "term", "topic", "word", "type"), phrase),
    "number": (("count", "limit", "amount", "total", "number", "max"), amount),
}
"""Kind of value -> usual names of such an argument, and the function that draws a value. An argument with an invented
name may have any kind."""
WEIGHTS = (16, 6, 5, 5, 6, 4, 8, 9, 8, 3, 4, 9, 5, 8, 10)
"""Relative frequency of each kind, in the order of KINDS."""


SHAPES: dict[Shape, int] = {"one": 70, "many": 12, "flag": 2, "choice": 9, "object": 4, "objects": 3}
"""Relative frequency of each shape of an argument."""
RICH_SHAPES: dict[Shape, int] = {"one": 43, "many": 28, "flag": 5, "choice": 10, "object": 7, "objects": 7}
"""The same in services with many lists and objects."""
LIST_PARTS = 0.2
"""Share of an object's fields that are lists."""


@dataclass(frozen=True)
class Field:
    """An argument of a tool. `telling`: its name shows its kind, so that a request may state the value without the
    name. `choices` are the values of a choice, `parts` the fields of an object."""

    name: str
    kind: str = "word"
    shape: Shape = "one"
    telling: bool = False
    choices: tuple[str, ...] = ()
    parts: tuple["Field", ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of its name, in lower case."""
        return words_of(self.name)

    def draw(self, source: WordSource) -> Json:
        """Draw a value as JSON."""
        rng = source.rng
        match self.shape:
            case "flag":
                return rng.random() < 0.6
            case "choice":
                return rng.choice(self.choices)
            case "many":
                return [KINDS[self.kind][1](source) for _ in range(rng.choice([1, 2, 2, 3]))]
            case "object":
                return {part.name: part.draw(source) for part in self.parts}
            case "objects":
                count = rng.choice([1, 1, 1, 2])
                return [{part.name: part.draw(source) for part in self.parts} for _ in range(count)]
            case _:
                return KINDS[self.kind][1](source)

    def schema(self) -> dict[str, Json]:
        """Its JSON Schema."""
        one: dict[str, Json] = {"type": "number" if self.kind == "number" else "string"}
        match self.shape:
            case "flag":
                return {"type": "boolean"}
            case "choice":
                return {"type": "string", "enum": list(self.choices)}
            case "many":
                return {"type": "array", "items": one}
            case "object":
                return object_schema(self.parts, ())
            case "objects":
                return {"type": "array", "items": object_schema(self.parts, ())}
            case _:
                return one


def object_schema(required: tuple[Field, ...], optional: tuple[Field, ...]) -> dict[str, Json]:
    """The JSON Schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {field.name: field.schema() for field in required + optional},
        "required": [field.name for field in required],
    }


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case.

    >>> words_of("max_count"), words_of("max-count"), words_of("maxCount")
    (['max', 'count'], ['max', 'count'], ['max', 'count'])
    """
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return spaced.replace("_", " ").replace("-", " ").lower().split()


def joined(words: list[str], style: str) -> str:
    """The words as one name: joined by `_` or `-`, or in camel case for any other style.

    >>> joined(["max", "count"], "-"), joined(["max", "count"], "camel")
    ('max-count', 'maxCount')
    """
    if style in "_-":
        return style.join(words)
    return words[0] + "".join(word.capitalize() for word in words[1:])


def draw_field(source: WordSource, style: str, taken: set[str], plain: bool = False, rich: bool = False) -> Field:
    """An argument whose name is not in `taken`; its name is added there. `plain`: one string or number, no list, flag,
    choice or object. `rich`: more of these, as in RICH_SHAPES."""
    rng = source.rng
    kind = rng.choices(list(KINDS), WEIGHTS)[0]
    noun = rng.choice(KINDS[kind][0])
    draw = rng.random()
    telling = draw < 0.65
    words = [noun] if draw < 0.35 else [source.draw(), noun] if draw < 0.6 else [noun, source.draw()]
    name = joined(words if telling else [source.draw() for _ in range(rng.choice([1, 1, 2]))], style)
    if name in taken:
        name, telling = source.draw(), False
    taken.add(name)
    field = Field(name, kind, "one", telling)
    shares = RICH_SHAPES if rich else SHAPES
    shape = "one" if plain else rng.choices(list(shares), list(shares.values()))[0]
    match shape:
        case "one":
            return field
        case "many":
            return as_list(field, taken)
        case "flag":
            return Field(name, "word", "flag")
        case "choice":
            draw = source.draw if rng.random() < 0.75 else partial(title, source)
            return Field(name, "word", "choice", choices=tuple(draw() for _ in range(rng.choice([2, 3, 3, 4]))))
        case _:
            names: set[str] = set()
            parts = tuple(draw_part(source, style, names) for _ in range(rng.choice([2, 2, 3])))
            return Field(name, "word", shape, parts=parts)


def draw_part(source: WordSource, style: str, taken: set[str]) -> Field:
    """A field of an object: one value, or a list. Its name is added to `taken`."""
    part = draw_field(source, style, taken, plain=True)
    return as_list(part, taken) if source.rng.random() < LIST_PARTS else part


def as_list(field: Field, taken: set[str]) -> Field:
    """The field as a list of strings with a plural name, which is added to `taken`; the field itself if it is there."""
    several = f"{field.name}s"
    if several in taken:
        return field
    taken.add(several)
    return replace(field, name=several, kind="word" if field.kind == "number" else field.kind, shape="many")


def draw_optional(source: WordSource, style: str, taken: set[str], rich: bool = False) -> Field:
    """An optional argument, often a flag or a number. Its name is added to `taken`."""
    draw = source.rng.random()
    if draw > 0.5:
        return draw_field(source, style, taken, rich=rich)
    name = joined([source.draw() for _ in range(source.rng.choice([1, 2]))], style)
    taken.add(name)
    return Field(name, "word", "flag") if draw < 0.28 else Field(name, "number")


def draw_pair(source: WordSource, style: str, taken: set[str]) -> tuple[Field, ...]:
    """Two arguments of one kind, such as a start and an end. Empty if one of the names is in `taken`; else both are
    added there.

    Half of the pairs share a compound noun, such as `from_filedate` and `to_filedate`. Most of those have an argument
    with the compound's first part as its name between or beside them, so that one name begins like a part of another."""
    rng = source.rng
    kind = rng.choices(list(KINDS), WEIGHTS)[0]
    noun = rng.choice(KINDS[kind][0])
    beginnings = rng.choice(PAIRS) if rng.random() < 0.6 else (source.draw(), source.draw())
    other = rng.choices(list(KINDS), WEIGHTS)[0]
    part = rng.choice([source.draw(), rng.choice(KINDS[other][0])]) if rng.random() < 0.5 else ""
    fields = [Field(joined([begin, part + noun], style), kind, "one", True) for begin in beginnings]
    if part and rng.random() < 0.7:
        fields.insert(rng.choice([0, 1, 1, 2]), Field(part, other, "one", part in KINDS[other][0]))
    names = {field.name for field in fields}
    if taken & names or len(names) < len(fields):
        return ()
    taken.update(names)
    return tuple(fields)


def flat(value: Json) -> list[str]:
    """The strings and numbers inside a value, as a request shows them. Booleans are left out.

    >>> flat({"to": ["a@b.org", "c"], "limit": 3, "all": True})
    ['a@b.org', 'c', '3']
    """
    if isinstance(value, dict):
        return [text for part in value.values() for text in flat(part)]
    if isinstance(value, list):
        return [text for part in value for text in flat(part)]
    return [] if isinstance(value, bool) else [str(value)]
