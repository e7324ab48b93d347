"""The first episodes that a policy is trained on. Tools have short names, and most take one argument."""

import random
from collections.abc import Sequence

from .episodes import CONTINUE_SHARE, Episode, Turn, call_text, exchange
from .tool_sets import Argument, Tool
from .wording import Mention, mention, with_filler
from .words import Value, WordSource, number

LEADING_SHARE = 0.5
"""Share of results that return an argument of another tool, where there is such a tool."""


def basic_episode(rng: random.Random, held_out: bool = False, naming: float = 0.0) -> Episode:
    """An episode with one request, one or two calls with their results, and an answer.

    A share `naming` of the requests names its tool. The others leave the choice open: every tool that takes the stated
    argument is right. Where a result returns an argument of other tools, half of the episodes go on to one of them."""
    source = WordSource(rng, held_out)
    keys: list[tuple[Argument, ...]] = [(Argument(source.draw()),) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.15:
        keys[0] = (*keys[0], Argument(source.draw()))
    nouns = [source.draw(), *(key[0].name for key in keys)]
    drawn_tools = [draw_basic_tool(source, nouns, rng.choice(keys)) for _ in range(rng.randint(1, 6))]
    tools = list({tool.name: tool for tool in drawn_tools}.values())
    chosen = rng.choice(tools)
    offered: dict[str, Value] = {argument.name: short_value(source) for argument in chosen.required}
    phrases = [f"{name} {quoted(value)}" for name, value in offered.items()]
    named = mention(rng, chosen, tools) if rng.random() < naming else None
    if named:
        phrases.append(named.text)
        rng.shuffle(phrases)
    drawn = Episode("named" if named else "open", [tool.schema() for tool in tools])
    request = with_filler(source, phrases, 2 if named else 4)
    drawn.messages.append({"role": "user", "content": request})
    fitting = [chosen] if named else [tool for tool in tools if tool.required == chosen.required]
    drawn.turns.append(Turn(tuple(call_text(tools, tool, offered, named) for tool in fitting), (), call_share=1.0))
    add_calls_and_answer(drawn, source, tools, chosen, offered, named)
    return drawn


def add_calls_and_answer(
    drawn: Episode,
    source: WordSource,
    tools: Sequence[Tool],
    chosen: Tool,
    offered: dict[str, Value],
    named: Mention | None,
) -> None:
    """Append the first call and its result, possibly a second call with what the result returned, and the answer."""
    rng = source.rng
    leads = {tool.required for tool in tools if tool.required != chosen.required and len(tool.required) == 1}
    if leads and rng.random() < LEADING_SHARE:
        taken = rng.choice(sorted(leads, key=str))
        result: dict[str, Value] = {taken[0].name: short_value(source)}
        following = [tool for tool in tools if tool.required == taken]
    else:
        result = {"result": rng.choice([source.draw(), str(number(rng)), f"{source.draw()} {source.draw()}"])}
        following = []
    drawn.messages += exchange(rng, tools, chosen, offered, result, named)
    answer = f"The answer is {next(iter(result.values()))}."
    calls = tuple(call_text(tools, tool, result, None) for tool in following)
    drawn.turns.append(Turn(calls, (answer,), call_share=CONTINUE_SHARE if following else 0.0))
    if following and rng.random() < CONTINUE_SHARE:
        result_after: dict[str, Value] = {"result": source.draw()}
        drawn.messages += exchange(rng, tools, rng.choice(following), result, result_after, None)
        answer = f"The answer is {result_after['result']}."
        drawn.turns.append(Turn((), (answer,), call_share=0.0))
    drawn.messages.append({"role": "assistant", "content": answer})


def draw_basic_tool(source: WordSource, nouns: list[str], required: tuple[Argument, ...]) -> Tool:
    """A tool whose name has two words: both new, or one of them a noun that other tools share."""
    rng = source.rng
    draw = rng.random()
    parts = (source.draw(), source.draw() if draw < 0.5 else rng.choice(nouns))
    return Tool(parts[::-1] if draw > 0.75 else parts, required)


def quoted(value: Value) -> str:
    """A value as the request states it: in quotes when it has several words."""
    return f'"{value}"' if " " in str(value) else str(value)


def short_value(source: WordSource) -> str:
    """A word, two words, a number, or a word with a number."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.4:
        return source.draw()
    if draw < 0.6:
        return f"{source.draw()} {source.draw()}"
    return str(rng.randint(0, 9999)) if draw < 0.8 else f"{source.draw()}-{rng.randint(0, 99)}"
