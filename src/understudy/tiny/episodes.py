"""Synthetic episodes: a request, tool calls, results and an answer; half of them leave the choice of the tool open."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..types import Message
from ..types import Tool as ToolSchema
from .desks import Argument, Tool, draw_desk, draw_result, render_result
from .wording import Mention, filler, finish, mention, named_request, offers, open_request
from .words import Bag, Value, phrase, spoken, title

Kind = Literal["named", "chain", "open", "plain", "idle", "service"]
KINDS: tuple[Kind, ...] = ("named", "chain", "open", "plain", "idle")
SHARES = (0.33, 0.24, 0.36, 0.06, 0.01)
GO_ON = 0.5
MOST_CALLS = 3


@dataclass(frozen=True)
class Turn:
    """All completions that would be right at one turn of the assistant: calls and plain texts. `calling`: how often it
    is a call that is drawn."""

    calls: tuple[str, ...]
    texts: tuple[str, ...]
    calling: float

    def shares(self) -> dict[str, float]:
        """How often each completion is drawn."""
        found = dict.fromkeys(self.calls + self.texts, 0.0)
        for completions, share in ((self.calls, self.calling), (self.texts, 1 - self.calling)):
            for text in completions:
                found[text] += share / len(completions)
        return found


@dataclass
class Episode:
    """Tools and messages as a chat template takes them, and a turn for each of the assistant's messages."""

    kind: Kind
    tools: list[ToolSchema] = field(default_factory=list[ToolSchema])
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[Turn] = field(default_factory=list[Turn])


@dataclass(frozen=True)
class Goal:
    """What a request asks: tools it names in order, values it offers, and a field of the result, or None."""

    named: tuple[Mention, ...]
    offered: dict[str, Value]
    field: str | None


def episode(rng: random.Random, held_out: bool = False, kind: Kind | None = None) -> Episode:
    """Draws an episode; `held_out` takes the words and sentence frames that training never shows."""
    kind = kind or rng.choices(KINDS, SHARES)[0]
    bag = Bag(rng, held_out)
    drawn = Episode(kind)
    if rng.random() < 0.2:
        drawn.messages.append({"role": "system", "content": system_prompt(bag)})
    if kind == "plain":
        small_talk(drawn, bag, *plain(bag))
        return drawn
    desk = draw_desk(bag)
    drawn.tools = [tool.schema() for tool in desk]
    if kind == "idle":
        small_talk(drawn, bag, *idle(bag))
        return drawn
    add_task(drawn, bag, desk, kind, held_out)
    if rng.random() < 0.05 and not held_out:
        add_task(drawn, bag, desk, rng.choices(KINDS[:3], SHARES[:3])[0], held_out)
    return drawn


def add_task(drawn: Episode, bag: Bag, desk: Sequence[Tool], kind: Kind, held_out: bool) -> None:
    """Appends a request and the conversation that serves it; a desk without a chain falls back to one tool."""
    rng = bag.rng
    named: tuple[Tool, ...] = ()
    pairs = [(a, b) for a in desk for b in desk if a is not b and a.required and leads(a, b)]
    if kind == "chain" and pairs:
        named = rng.choice(pairs)
        subject = named[0]
    elif kind == "open" and (with_argument := [tool for tool in desk if tool.required]):
        subject = popular(rng, with_argument)
    else:
        subject = rng.choice(desk)
        named = (subject,)
    arguments = offered_arguments(bag, subject)
    result_fields = [argument.name for argument in (named or (subject,))[-1].fields]
    asking = 0.6 if named and not held_out else 0.3
    wanted = rng.choice(result_fields) if result_fields and rng.random() < asking else None
    if any(wanted in tool.parts for tool in desk if tool not in named):
        wanted = None  # in a request, it would name that tool
    keys = {argument.name for tool in desk for argument in tool.required}
    bare = len(arguments) == 1 and (kind == "named" or len(keys) == 1) and rng.random() < 0.3
    given = offers(bag, arguments, bare) if arguments else ""
    hints = [wanted] if wanted and len(result_fields) > 1 else []
    mentions = tuple(mention(rng, tool, desk) for tool in named)
    if mentions:
        request = named_request(bag, [each.text for each in mentions] + hints, given, held_out)
    else:
        request = open_request(bag, given, hints)
    drawn.messages.append({"role": "user", "content": request})
    goal = Goal(mentions, {argument.name: offered for argument, offered in arguments.items()}, wanted)
    play(drawn, bag, desk, goal)


def popular(rng: random.Random, tools: list[Tool]) -> Tool:
    """A tool, the likelier the more tools take the same arguments, so that a choice remains."""
    return rng.choices(tools, [sum(tool.required == each.required for each in tools) for tool in tools])[0]


def leads(first: Tool, last: Tool) -> bool:
    """Whether a result of the first tool carries all that the last one needs."""
    return bool(last.required) and all(argument in first.links for argument in last.required)


def offered_arguments(bag: Bag, tool: Tool) -> dict[Argument, Value]:
    """Values for all required arguments of a tool, and for half of the optional ones."""
    optional = tuple(argument for argument in tool.optional if bag.rng.random() < 0.5)
    return {argument: argument.draw(bag, link=argument is tool.required[0]) for argument in tool.required + optional}


def play(drawn: Episode, bag: Bag, desk: Sequence[Tool], goal: Goal) -> None:
    """Calls and answers: a named tool that fits is called; else any that fits, and after a result, maybe none."""
    rng = bag.rng
    waiting = list(goal.named)
    offered = goal.offered
    called: list[Tool] = []
    result: dict[str, Value] | Value = ""
    while True:
        fitting = [tool for tool in desk if tool not in called and tool.fits(offered)]
        due = [each for each in waiting if each.tool in fitting][:1]
        named = due[0] if due else None
        open_end = bool(called) and not due
        callable_now = [each.tool for each in due] or (fitting if not called or not goal.named else [])
        ended = len(called) == MOST_CALLS or not callable_now
        drawn.turns.append(
            Turn(
                calls=tuple(call_text(desk, tool, offered, named) for tool in callable_now),
                texts=tuple(answers(result, goal.field)) if open_end else (),
                calling=0.0 if ended else GO_ON if open_end else 1.0,
            )
        )
        if ended or (open_end and rng.random() >= GO_ON):
            break
        chosen = rng.choice(callable_now)
        waiting = [each for each in waiting if each.tool is not chosen]
        called.append(chosen)
        result = draw_result(bag, chosen)
        drawn.messages += exchange(rng, desk, chosen, offered, result, named)
        offered = linked(desk, result)
    drawn.messages.append({"role": "assistant", "content": rng.choice(drawn.turns[-1].texts)})


def linked(desk: Sequence[Tool], result: dict[str, Value] | Value) -> dict[str, Value]:
    """The fields of a result that some tool takes as an argument."""
    if not isinstance(result, dict):
        return {}
    keys = {argument.name for tool in desk for argument in tool.required}
    return {name: drawn for name, drawn in result.items() if name in keys}


def arguments_of(tool: Tool, offered: dict[str, Value]) -> str:
    """The arguments of a call as JSON, in the order of the signature."""
    taken = [argument.name for argument in tool.required + tool.optional if argument.name in offered]
    return json.dumps({name: offered[name] for name in taken})


def call_text(tools: Sequence[Tool], tool: Tool, offered: dict[str, Value], named: Mention | None) -> str:
    """The completion that calls a tool, as the chat template writes it: what it goes by, then the call."""
    call = f'{{"name": "{tool.name}", "arguments": {arguments_of(tool, offered)}}}'
    return completion(opening(tools, tool, named), call)


def completion(thought: str, call: str) -> str:
    """A call as the assistant writes it, after the line that it goes by."""
    return f"<think>{thought}</think><tool_call>\n{call}\n</tool_call>"


def opening(tools: Sequence[Tool], tool: Tool, named: Mention | None) -> str:
    """What the policy copies of a tool's line: from the words that name it, to the end; if the request names none, the
    arguments that it requires, and the number."""
    number = f"<{tools.index(tool) + 1}>"
    if named is None:
        return ", ".join(argument.name for argument in tool.required) + number
    said = tool.name if named.whole else tool.parts[-1]
    return f"{said}{number}({tool.signature})"


def exchange(
    rng: random.Random,
    tools: Sequence[Tool],
    tool: Tool,
    offered: dict[str, Value],
    result: dict[str, Value] | Value,
    named: Mention | None,
) -> list[Message]:
    """An assistant's call and the tool's message."""
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments_of(tool, offered)}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": opening(tools, tool, named), "tool_calls": [call]},
        {"role": "tool", "content": render_result(rng, result)},
    ]


def answers(result: dict[str, Value] | Value, wanted: str | None) -> list[str]:
    """The answer with the field asked for, else one for each field, else the bare result."""
    if not isinstance(result, dict):
        found = [result]
    else:
        found = [result[wanted]] if wanted in result else list(result.values())
    return [f"The answer is {spoken(each)}." for each in found]


def system_prompt(bag: Bag) -> str:
    """Words before the tools that change nothing."""
    if bag.rng.random() < 0.4:
        return f"You are a {bag.draw()} {bag.draw()}. {finish(bag.rng, ' '.join(filler(bag, 5)) or bag.draw())}"
    return finish(bag.rng, " ".join([bag.draw(), *filler(bag, 8)]))


def small_talk(drawn: Episode, bag: Bag, said: str, replies: list[str]) -> None:
    """Appends a request and one of its replies."""
    drawn.turns.append(Turn((), tuple(replies), calling=0.0))
    drawn.messages.append({"role": "user", "content": said})
    drawn.messages.append({"role": "assistant", "content": bag.rng.choice(replies)})


def idle(bag: Bag) -> tuple[str, list[str]]:
    """Small talk that needs no tool, and its reply."""
    said, reply = bag.rng.choice([("hello", "Hello."), ("thanks", "You are welcome."), ("bye", "Goodbye.")])
    return finish(bag.rng, said), [reply]


def plain(bag: Bag) -> tuple[str, list[str]]:
    """A request that is answered with words of the request, and its right replies."""
    rng = bag.rng
    text = phrase(bag) if rng.random() < 0.6 else " ".join(bag.draw() for _ in range(rng.randint(2, 10)))
    several = [bag.draw() for _ in range(rng.randint(2, 4))]
    name = title(bag)
    listed = ", ".join(several[:-1]) + f" or {several[-1]}"
    return rng.choice(
        [
            (f"say {text}", [text]),
            (f"repeat after me: {text}", [text]),
            (f'echo "{text}"', [text]),
            (f"write the words {text}", [text]),
            (f"pick one: {listed}", several),
            (f"choose {listed}", several),
            (f"what is the first word of {' '.join(several)}", several[:1]),
            (f"what is the last word of {' '.join(several)}", several[-1:]),
            (f"my name is {name}", [f"Hello {name}."]),
            (f"who are you, {bag.draw()}", ["I am a tiny policy."]),
        ]
    )
