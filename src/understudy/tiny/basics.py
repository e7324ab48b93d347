"""The first episodes a policy sees: the request gives a value, and the tools that take it fit, or it names one of them."""

import random
from collections.abc import Sequence

from .desks import Argument, Tool
from .episodes import GO_ON, Episode, Turn, call_text, exchange
from .wording import Mention, mention, soup
from .words import Bag, Value, number

LEADING = 0.5


def basic_episode(rng: random.Random, held_out: bool = False, naming: float = 0.0) -> Episode:
    """A request, a call, its result and an answer; a share `naming` of the requests names its tool, else any that takes
    what is given may be called. Some results give what other tools take: then half go on to one of these."""
    bag = Bag(rng, held_out)
    keys: list[tuple[Argument, ...]] = [(Argument(bag.draw()),) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.15:
        keys[0] = (*keys[0], Argument(bag.draw()))
    nouns = [bag.draw(), *(key[0].name for key in keys)]
    drawn_tools = [draw_basic_tool(bag, nouns, rng.choice(keys)) for _ in range(rng.randint(1, 6))]
    tools = list({tool.name: tool for tool in drawn_tools}.values())
    chosen = rng.choice(tools)
    offered: dict[str, Value] = {argument.name: short_value(bag) for argument in chosen.required}
    said = [f"{name} {quoted(value)}" for name, value in offered.items()]
    named = mention(rng, chosen, tools) if rng.random() < naming else None
    if named:
        said.append(named.text)
        rng.shuffle(said)
    drawn = Episode("named" if named else "open", [tool.schema() for tool in tools])
    request = soup(bag, said, 2 if named else 4)
    drawn.messages.append({"role": "user", "content": request})
    fitting = [chosen] if named else [tool for tool in tools if tool.required == chosen.required]
    drawn.turns.append(Turn(tuple(call_text(tools, tool, offered, named) for tool in fitting), (), calling=1.0))
    follow(drawn, bag, tools, chosen, offered, named)
    return drawn


def follow(
    drawn: Episode, bag: Bag, tools: Sequence[Tool], chosen: Tool, offered: dict[str, Value], named: Mention | None
) -> None:
    """Appends the call, its result, maybe a second call with what the result gives, and the answer."""
    rng = bag.rng
    leads = {tool.required for tool in tools if tool.required != chosen.required and len(tool.required) == 1}
    if leads and rng.random() < LEADING:
        taken = rng.choice(sorted(leads, key=str))
        result: dict[str, Value] = {taken[0].name: short_value(bag)}
        following = [tool for tool in tools if tool.required == taken]
    else:
        result = {"result": rng.choice([bag.draw(), str(number(rng)), f"{bag.draw()} {bag.draw()}"])}
        following = []
    drawn.messages += exchange(rng, tools, chosen, offered, result, named)
    answer = f"The answer is {next(iter(result.values()))}."
    calls = tuple(call_text(tools, tool, result, None) for tool in following)
    drawn.turns.append(Turn(calls, (answer,), calling=GO_ON if following else 0.0))
    if following and rng.random() < GO_ON:
        result_after: dict[str, Value] = {"result": bag.draw()}
        drawn.messages += exchange(rng, tools, rng.choice(following), result, result_after, None)
        answer = f"The answer is {result_after['result']}."
        drawn.turns.append(Turn((), (answer,), calling=0.0))
    drawn.messages.append({"role": "assistant", "content": answer})


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
