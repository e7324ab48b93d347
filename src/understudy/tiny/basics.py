"""The first episodes a policy sees: the request gives a value, the tools that take it fit, and no name can be copied from it."""

import random

from .desks import Argument, Tool
from .episodes import Episode, Turn, call_text, exchange
from .wording import soup
from .words import Bag, Value, number


def basic_episode(rng: random.Random, held_out: bool = False) -> Episode:
    """A request, one call, its result and an answer; any of the tools that take what is given may be called."""
    bag = Bag(rng, held_out)
    keys: list[tuple[Argument, ...]] = [(Argument(bag.draw()),) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.15:
        keys[0] = (*keys[0], Argument(bag.draw()))
    nouns = [bag.draw(), *(key[0].name for key in keys)]
    tools = [draw_basic_tool(bag, nouns, rng.choice(keys)) for _ in range(rng.randint(1, 6))]
    taken = rng.choice(tools).required
    fitting = [tool for tool in tools if tool.required == taken]
    offered: dict[str, Value] = {argument.name: short_value(bag) for argument in taken}
    chosen = rng.choice(fitting)
    result = rng.choice([bag.draw(), str(number(rng)), f"{bag.draw()} {bag.draw()}"])
    answer = f"The answer is {result}."
    drawn = Episode("open", [tool.schema() for tool in tools])
    drawn.turns = [Turn(tuple(call_text(tools, tool, offered) for tool in fitting), ()), Turn((), (answer,))]
    drawn.messages = [
        {"role": "user", "content": soup(bag, [f"{name} {quoted(value)}" for name, value in offered.items()], 4)},
        *exchange(rng, tools, chosen, offered, {"result": result}),
        {"role": "assistant", "content": answer},
    ]
    return drawn


def draw_basic_tool(bag: Bag, nouns: list[str], required: tuple[Argument, ...]) -> Tool:
    """A tool whose name has two parts: both new, or one of them a noun that other tools share."""
    rng = bag.rng
    draw = rng.random()
    parts = (bag.draw(), bag.draw() if draw < 0.5 else rng.choice(nouns))
    return Tool(parts[::-1] if draw > 0.75 else parts, required)


def quoted(value: Value) -> str:
    """The value as the request shows it: in quotes when it has several words."""
    return f'"{value}"' if " " in str(value) else str(value)


def short_value(bag: Bag) -> str:
    """A word, two words, a number, or a word with a number."""
    rng = bag.rng
    draw = rng.random()
    if draw < 0.4:
        return bag.draw()
    if draw < 0.6:
        return f"{bag.draw()} {bag.draw()}"
    return str(rng.randint(0, 9999)) if draw < 0.8 else f"{bag.draw()}-{rng.randint(0, 99)}"
