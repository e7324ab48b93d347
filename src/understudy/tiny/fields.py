"""Arguments of services' tools: kinds of value that text contains (paths, dates, addresses), lists, flags and objects."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..types import Json
from .words import Bag, number, phrase, title

Shape = Literal["one", "many", "flag", "choice", "object", "objects"]
UNITS = ("km", "kg", "ms", "GB", "%", "h", "m", "min", "EUR", "px", "s")
ENDINGS = ("txt", "md", "py", "json", "csv", "log", "yaml", "png", "toml", "pdf")
DOMAINS = ("com", "org", "net", "example", "io", "dev")
PAIRS = (("from", "to"), ("old", "new"), ("first", "second"), ("start", "end"), ("base", "head"), ("left", "right"))
"""Two arguments of one kind, whose values come in this order."""


def path(bag: Bag) -> str:
    """A file or folder, absolute or not."""
    rng = bag.rng
    steps = [step(bag) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    start = rng.choice(["/", "/", "/", "", "", "./", "~/", "../"])
    if rng.random() < 0.6:
        steps[-1] += f".{rng.choice(ENDINGS)}"
    elif len(steps) == 1 and not start:
        start = "/"
    return start + "/".join(steps)


def step(bag: Bag) -> str:
    """One name between slashes."""
    draw = bag.rng.random()
    if draw < 0.6:
        return bag.draw()
    if draw < 0.75:
        return f"{bag.draw()}{bag.rng.choice('-_')}{bag.draw()}"
    return f"{bag.draw()}{bag.rng.choice(['-', '_', ''])}{number(bag.rng)}" if draw < 0.9 else bag.draw().capitalize()


def url(bag: Bag) -> str:
    """An address with a host, maybe a path and a query."""
    rng = bag.rng
    host = f"{rng.choice(['https://', 'https://', 'http://'])}{bag.draw()}.{rng.choice(DOMAINS)}"
    tail = "".join(f"/{step(bag)}" for _ in range(rng.choice([0, 1, 1, 2])))
    return host + tail + (f"?{bag.draw()}={number(rng)}" if rng.random() < 0.2 else "")


def email(bag: Bag) -> str:
    """An e-mail address."""
    first = bag.draw() + (f".{bag.draw()}" if bag.rng.random() < 0.3 else "")
    return f"{first}@{bag.draw()}.{bag.rng.choice(DOMAINS)}"


def date(bag: Bag) -> str:
    """An ISO date."""
    return f"20{bag.rng.randint(10, 39)}-{bag.rng.randint(1, 12):02}-{bag.rng.randint(1, 28):02}"


def clock(bag: Bag) -> str:
    """A time of day, with seconds now and then."""
    text = f"{bag.rng.randint(0, 23):02}:{bag.rng.randint(0, 59):02}"
    return text + (f":{bag.rng.randint(0, 59):02}" if bag.rng.random() < 0.15 else "")


def instant(bag: Bag) -> str:
    """An ISO date and time."""
    return date(bag) + "T" + clock(bag) + bag.rng.choice(["", "", "Z"])


def zone(bag: Bag) -> str:
    """An area and a place: `Brova/Tel_Mek`."""
    names = [bag.draw().capitalize() for _ in range(bag.rng.choice([1, 1, 1, 2]))]
    return f"{bag.draw().capitalize()}/{'_'.join(names)}"


def identifier(bag: Bag) -> str:
    """An id: letters and digits with marks between them."""
    rng = bag.rng
    draw = rng.random()
    if draw < 0.25:
        return f"{bag.draw()}-{number(rng)}"
    if draw < 0.4:
        return f"#{number(rng)}"
    if draw < 0.55:
        return "".join(rng.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(rng.choice([2, 3]))) + f"-{number(rng)}"
    if draw < 0.7:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.choice([6, 7, 8])))
    return f"{bag.draw()}_{bag.draw()}" if draw < 0.85 else f"{bag.draw()}:{number(rng)}"


def branch(bag: Bag) -> str:
    """A name as version control has it: `brova/tel-mek`, `v1.2.0`, `brova~2`, or a word."""
    rng = bag.rng
    draw = rng.random()
    if draw < 0.4:
        return f"{bag.draw()}/{bag.draw()}" + (f"-{bag.draw()}" if rng.random() < 0.5 else "")
    if draw < 0.6:
        return f"v{rng.randint(0, 9)}.{rng.randint(0, 20)}" + rng.choice(["", f".{rng.randint(0, 9)}"])
    return (
        f"{bag.draw()}-{bag.draw()}" if draw < 0.8 else bag.draw() + rng.choice(["", "", "~1", f"~{rng.randint(2, 9)}"])
    )


def pattern(bag: Bag) -> str:
    """A pattern of file names."""
    return bag.rng.choice(["*.", "**/*.", f"{bag.draw()}/*.", f"{bag.draw()}*."]) + bag.rng.choice(ENDINGS)


def measure(bag: Bag) -> str:
    """A number and its unit."""
    amount = number(bag.rng) if bag.rng.random() < 0.7 else f"{bag.rng.randint(0, 99)}.{bag.rng.randint(0, 9)}"
    return f"{amount} {bag.rng.choice(UNITS)}" if bag.rng.random() < 0.8 else f"{amount}{bag.rng.choice(UNITS)}"


def text(bag: Bag) -> str:
    """Several words, with a mark between them or without."""
    words = [bag.draw() for _ in range(bag.rng.choice([2, 2, 3, 3, 4, 5]))]
    if bag.rng.random() < 0.3:
        words[0] = words[0].capitalize()
    if bag.rng.random() < 0.25:
        words[0] += bag.rng.choice([":", ",", "!", " -", " =", "."])
    return " ".join(words)


def amount(bag: Bag) -> Json:
    """A number, now and then with a sign or decimals."""
    draw = bag.rng.random()
    if draw < 0.85:
        return number(bag.rng)
    return -bag.rng.randint(1, 99) if draw < 0.9 else bag.rng.randint(1, 999) / 10


KINDS: dict[str, tuple[tuple[str, ...], Callable[[Bag], Json]]] = {
    "path": (("path", "file", "folder", "directory", "filename"), path),
    "url": (("url", "link", "address", "page", "site"), url),
    "email": (("email", "recipient", "sender", "contact"), email),
    "date": (("date", "day", "deadline", "birthday"), date),
    "time": (("time", "hour", "clock"), clock),
    "instant": (("timestamp", "moment", "since", "until"), instant),
    "zone": (("zone", "region", "area", "place"), zone),
    "id": (("id", "key", "code", "ticket"), identifier),
    "branch": (("branch", "tag", "version", "revision", "release"), branch),
    "pattern": (("pattern", "glob", "filter"), pattern),
    "measure": (("size", "length", "weight", "duration"), measure),
    "text": (("text", "message", "note", "content", "comment"), text),
    "name": (("name", "title", "label", "city"), title),
    "word": (("query", "term", "topic", "word", "type"), phrase),
    "number": (("count", "limit", "amount", "total", "number", "max"), amount),
}
"""Each kind's usual names for an argument, and its values. An invented name may have any kind."""
WEIGHTS = (16, 6, 5, 5, 6, 4, 8, 9, 8, 3, 4, 9, 5, 8, 10)


@dataclass(frozen=True)
class Field:
    """An argument. `telling`: its name tells its kind, so that a value may stand without it."""

    name: str
    kind: str = "word"
    shape: Shape = "one"
    telling: bool = False
    choices: tuple[str, ...] = ()
    parts: tuple["Field", ...] = ()

    @property
    def words(self) -> list[str]:
        """The words of its name, in small letters."""
        return words_of(self.name)

    def draw(self, bag: Bag) -> Json:
        """A value."""
        rng = bag.rng
        match self.shape:
            case "flag":
                return rng.random() < 0.6
            case "choice":
                return rng.choice(self.choices)
            case "many":
                return [KINDS[self.kind][1](bag) for _ in range(rng.choice([1, 2, 2, 3]))]
            case "object":
                return {part.name: part.draw(bag) for part in self.parts}
            case "objects":
                return [{part.name: part.draw(bag) for part in self.parts}]
            case _:
                return KINDS[self.kind][1](bag)

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
    """The JSON Schema of an object of these fields."""
    return {
        "type": "object",
        "properties": {each.name: each.schema() for each in required + optional},
        "required": [each.name for each in required],
    }


def words_of(name: str) -> list[str]:
    """The words of a name, in small letters: `max_count`, `max-count` and `maxCount` are two."""
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return spaced.replace("_", " ").replace("-", " ").lower().split()


def joined(words: list[str], style: str) -> str:
    """The words as one name: with `_`, with `-`, or in camel case for any other style."""
    if style in "_-":
        return style.join(words)
    return words[0] + "".join(word.capitalize() for word in words[1:])


def draw_field(bag: Bag, style: str, taken: set[str], plain: bool = False) -> Field:
    """An argument whose name is not taken. `plain`: one value, no list, flag, choice or object."""
    rng = bag.rng
    kind = rng.choices(list(KINDS), WEIGHTS)[0]
    noun = rng.choice(KINDS[kind][0])
    draw = rng.random()
    telling = draw < 0.65
    words = [noun] if draw < 0.35 else [bag.draw(), noun] if draw < 0.6 else [noun, bag.draw()]
    name = joined(words if telling else [bag.draw() for _ in range(rng.choice([1, 1, 2]))], style)
    if name in taken:
        name, telling = bag.draw(), False
    taken.add(name)
    draw = rng.random()
    if plain or draw < 0.72:
        return Field(name, kind, "one", telling)
    if draw < 0.84 and (several := f"{name}s") not in taken:
        taken.add(several)
        return Field(several, kind if kind != "number" else "word", "many", telling)
    if draw < 0.93:
        return Field(name, "word", "choice", choices=tuple(bag.draw() for _ in range(rng.choice([2, 3, 3, 4]))))
    parts = tuple(draw_field(bag, style, set(), plain=True) for _ in range(rng.choice([2, 2, 3])))
    if len({part.name for part in parts}) < len(parts):
        return Field(name, kind, "one", telling)
    return Field(name, "word", rng.choice(["object", "objects"]), parts=parts)


def draw_optional(bag: Bag, style: str, taken: set[str]) -> Field:
    """An optional argument: often a flag or a number."""
    draw = bag.rng.random()
    if draw > 0.5:
        return draw_field(bag, style, taken)
    name = joined([bag.draw() for _ in range(bag.rng.choice([1, 2]))], style)
    taken.add(name)
    return Field(name, "word", "flag") if draw < 0.28 else Field(name, "number")


def draw_pair(bag: Bag, style: str, taken: set[str]) -> tuple[Field, ...]:
    """Two arguments of one kind, the first before the second; none if the names are taken."""
    kind = bag.rng.choices(list(KINDS), WEIGHTS)[0]
    noun = bag.rng.choice(KINDS[kind][0])
    pair = tuple(Field(joined([begin, noun], style), kind, "one", True) for begin in bag.rng.choice(PAIRS))
    if taken & {each.name for each in pair}:
        return ()
    taken.update(each.name for each in pair)
    return pair


def flat(value: Json) -> list[str]:
    """The texts and numbers inside a value, as a request shows them."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in flat(each)]
    if isinstance(value, list):
        return [text for each in value for text in flat(each)]
    return [] if isinstance(value, bool) else [str(value)]
