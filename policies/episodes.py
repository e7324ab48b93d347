"""Synthetic episodes: a request, tool calls, their results and an answer. Some requests leave the choice of the tool
open."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from offbook.base.types import Message
from offbook.base.types import Tool as ToolSchema

from .tool_sets import Argument, Tool, draw_result, draw_tool_set, render_result
from .wording import Mention, argument_phrases, filler, finish, mention, named_request, open_request
from .words import Value, WordSource, phrase, title, value_text

Kind = Literal["named", "chain", "open", "plain", "idle", "service"]
KINDS: tuple[Kind, ...] = ("named", "chain", "open", "plain", "idle")
SHARES = (0.33, 0.24, 0.36, 0.06, 0.01)
"""Share of each of KINDS in training."""
CONTINUE_SHARE = 0.5
"""Probability of another call where a result makes one possible and the request names no tool."""
MAX_CALLS = 3


@dataclass(frozen=True)
class Turn:
    """All completions that would be right at one turn of the assistant. `call_share` is the probability that a call is
    drawn, not a text; calls are equally likely, and so are texts."""

    calls: tuple[str, ...]
    texts: tuple[str, ...]
    call_share: float

    def shares(self) -> dict[str, float]:
        """Completion -> its probability.

        >>> Turn(("<1>", "<2>"), ("7",), call_share=0.5).shares()
        {'<1>': 0.25, '<2>': 0.25, '7': 0.5}
        """
        shares = dict.fromkeys(self.calls + self.texts, 0.0)
        for completions, share in ((self.calls, self.call_share), (self.texts, 1 - self.call_share)):
            for text in completions:
                shares[text] += share / len(completions)
        return shares


@dataclass
class Episode:
    """Tools and messages in the format of chat templates, with a turn for each message of the assistant."""

    kind: Kind
    tools: list[ToolSchema] = field(default_factory=list[ToolSchema])
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[Turn] = field(default_factory=list[Turn])


@dataclass(frozen=True)
class Goal:
    """What a request is about: the tools that it names, in order; the values that it states; and the field of the
    result to answer with, None for any."""

    named: tuple[Mention, ...]
    offered: dict[str, Value]
    field: str | None


def episode(rng: random.Random, held_out: bool = False, kind: Kind | None = None) -> Episode:
    """Draw an episode, of a random kind by default. `held_out`: with words and sentence frames that training never
    has."""
    kind = kind or rng.choices(KINDS, SHARES)[0]
    source = WordSource(rng, held_out)
    drawn = Episode(kind)
    if rng.random() < 0.2:
        drawn.messages.append({"role": "system", "content": system_prompt(source)})
    if kind == "plain":
        add_small_talk(drawn, source, *plain_request(source))
        return drawn
    tools = draw_tool_set(source)
    drawn.tools = [tool.schema() for tool in tools]
    if kind == "idle":
        add_small_talk(drawn, source, *idle_request(source))
        return drawn
    add_task(drawn, source, tools, kind, held_out)
    if rng.random() < 0.05 and not held_out:
        add_task(drawn, source, tools, rng.choices(KINDS[:3], SHARES[:3])[0], held_out)
    return drawn


def add_task(drawn: Episode, source: WordSource, tools: Sequence[Tool], kind: Kind, held_out: bool) -> None:
    """Append a request, its calls and an answer. `kind="chain"` names two tools, or one where no tool's result leads to
    another tool."""
    rng = source.rng
    named: tuple[Tool, ...] = ()
    pairs = [(a, b) for a in tools for b in tools if a is not b and a.required and supplies(a, b)]
    if kind == "chain" and pairs:
        named = rng.choice(pairs)
        subject = named[0]
    elif kind == "open" and (with_argument := [tool for tool in tools if tool.required]):
        subject = draw_subject(rng, with_argument)
    else:
        subject = rng.choice(tools)
        named = (subject,)
    arguments = offered_arguments(source, subject)
    result_fields = [argument.name for argument in (named or (subject,))[-1].fields]
    asking = 0.6 if named and not held_out else 0.3
    wanted = rng.choice(result_fields) if result_fields and rng.random() < asking else None
    if any(wanted in tool.parts for tool in tools if tool not in named):
        wanted = None  # the request would name the other tool with this word
    keys = {argument.name for tool in tools for argument in tool.required}
    bare = len(arguments) == 1 and (kind == "named" or len(keys) == 1) and rng.random() < 0.3
    offered_text = argument_phrases(source, arguments, bare) if arguments else ""
    hints = [wanted] if wanted and len(result_fields) > 1 else []
    mentions = tuple(mention(rng, tool, tools) for tool in named)
    if mentions:
        request = named_request(source, [mention.text for mention in mentions] + hints, offered_text, held_out)
    else:
        request = open_request(source, offered_text, hints)
    drawn.messages.append({"role": "user", "content": request})
    goal = Goal(mentions, {argument.name: offered for argument, offered in arguments.items()}, wanted)
    add_calls_and_answer(drawn, source, tools, goal)


def draw_subject(rng: random.Random, tools: list[Tool]) -> Tool:
    """Draw a tool, weighted by the number of tools that take the same arguments, so that most open requests leave a
    choice."""
    return rng.choices(tools, [sum(tool.required == other.required for other in tools) for tool in tools])[0]


def supplies(first: Tool, last: Tool) -> bool:
    """Whether a result of `first` holds all arguments that `last` requires."""
    return bool(last.required) and all(argument in first.links for argument in last.required)


def offered_arguments(source: WordSource, tool: Tool) -> dict[Argument, Value]:
    """Values for all required arguments of a tool, and for half of the optional ones."""
    optional = tuple(argument for argument in tool.optional if source.rng.random() < 0.5)
    return {argument: argument.draw(source, link=argument is tool.required[0]) for argument in tool.required + optional}


def add_calls_and_answer(drawn: Episode, source: WordSource, tools: Sequence[Tool], goal: Goal) -> None:
    """Append calls, results and the answer until the goal is reached.

    A named tool that fits is called next. If none is named, any tool that fits may be called; after a result, the
    assistant may also answer."""
    rng = source.rng
    waiting = list(goal.named)
    offered = goal.offered
    called: list[Tool] = []
    result: dict[str, Value] | Value = ""
    while True:
        fitting = [tool for tool in tools if tool not in called and tool.fits(offered)]
        due = [mention for mention in waiting if mention.tool in fitting][:1]
        named = due[0] if due else None
        open_end = bool(called) and not due
        callable_now = [mention.tool for mention in due] or (fitting if not called or not goal.named else [])
        ended = len(called) == MAX_CALLS or not callable_now
        drawn.turns.append(
            Turn(
                calls=tuple(call_text(tools, tool, offered, named) for tool in callable_now),
                texts=tuple(answers(result, goal.field)) if open_end else (),
                call_share=0.0 if ended else CONTINUE_SHARE if open_end else 1.0,
            )
        )
        if ended or (open_end and rng.random() >= CONTINUE_SHARE):
            break
        chosen = rng.choice(callable_now)
        waiting = [mention for mention in waiting if mention.tool is not chosen]
        called.append(chosen)
        result = draw_result(source, chosen)
        drawn.messages += exchange(rng, tools, chosen, offered, result, named)
        offered = linked_values(tools, result)
    drawn.messages.append({"role": "assistant", "content": rng.choice(drawn.turns[-1].texts)})


def linked_values(tools: Sequence[Tool], result: dict[str, Value] | Value) -> dict[str, Value]:
    """The fields of a result that some tool requires as an argument."""
    if not isinstance(result, dict):
        return {}
    keys = {argument.name for tool in tools for argument in tool.required}
    return {name: drawn for name, drawn in result.items() if name in keys}


def arguments_of(tool: Tool, offered: dict[str, Value]) -> str:
    """The arguments of a call as JSON, in the order of the signature."""
    taken = [argument.name for argument in tool.required + tool.optional if argument.name in offered]
    return json.dumps({name: offered[name] for name in taken})


def call_text(tools: Sequence[Tool], tool: Tool, offered: dict[str, Value], named: Mention | None) -> str:
    """The completion that calls a tool: the thought, then the call."""
    call = f'{{"name": "{tool.name}", "arguments": {arguments_of(tool, offered)}}}'
    return completion(thought_of(tools, tool, named), call)


def completion(thought: str, call: str) -> str:
    """A call as the assistant writes it, after its thought.

    >>> completion("order<1>", '{"name": "status", "arguments": {}}')
    '<think>order<1></think><tool_call>\\n{"name": "status", "arguments": {}}\\n</tool_call>'
    """
    return f"<think>{thought}</think><tool_call>\n{call}\n</tool_call>"


def thought_of(tools: Sequence[Tool], tool: Tool, named: Mention | None) -> str:
    """The part of the tool's line in the system prompt that the policy copies before the call.

    If the request names the tool: from the name (or its last part) to the end of the line. Else: the required arguments
    and the tool's number."""
    number = f"<{tools.index(tool) + 1}>"
    if named is None:
        return ", ".join(argument.name for argument in tool.required) + number
    copied = tool.name if named.whole else tool.parts[-1]
    return f"{copied}{number}({tool.signature})"


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
        {"role": "assistant", "content": "", "reasoning_content": thought_of(tools, tool, named), "tool_calls": [call]},
        {"role": "tool", "content": render_result(rng, result)},
    ]


def answers(result: dict[str, Value] | Value, wanted: str | None) -> list[str]:
    """The right answers to a result: with the wanted field, else one answer per field, else the bare result."""
    if not isinstance(result, dict):
        values = [result]
    else:
        values = [result[wanted]] if wanted in result else list(result.values())
    return [f"The answer is {value_text(value)}." for value in values]


def system_prompt(source: WordSource) -> str:
    """A system prompt of random words."""
    if source.rng.random() < 0.4:
        role = f"{source.draw()} {source.draw()}"
        return f"You are a {role}. {finish(source.rng, ' '.join(filler(source, 5)) or source.draw())}"
    return finish(source.rng, " ".join([source.draw(), *filler(source, 8)]))


def add_small_talk(drawn: Episode, source: WordSource, request: str, replies: list[str]) -> None:
    """Append a request that needs no tool, and one of its replies."""
    drawn.turns.append(Turn((), tuple(replies), call_share=0.0))
    drawn.messages.append({"role": "user", "content": request})
    drawn.messages.append({"role": "assistant", "content": source.rng.choice(replies)})


def idle_request(source: WordSource) -> tuple[str, list[str]]:
    """Small talk that needs no tool, with its only right reply."""
    request, reply = source.rng.choice([("hello", "Hello."), ("thanks", "You are welcome."), ("bye", "Goodbye.")])
    return finish(source.rng, request), [reply]


def plain_request(source: WordSource) -> tuple[str, list[str]]:
    """A request whose reply copies words of the request, with all right replies."""
    rng = source.rng
    text = phrase(source) if rng.random() < 0.6 else " ".join(source.draw() for _ in range(rng.randint(2, 10)))
    several = [source.draw() for _ in range(rng.randint(2, 4))]
    name = title(source)
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
            (f"who are you, {source.draw()}", ["I am a tiny policy."]),
        ]
    )
