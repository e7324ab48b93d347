"""Episodes with services: requests that give odd values to tools of all types, results to quote, calls to mend."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Json, Message
from .asking import Naming, naming, offers, request, shown_in
from .episodes import Episode, Turn, completion, system_prompt
from .fields import KINDS, Field, flat
from .service_tools import ServiceTool, draw_service, signature, size_at
from .words import Bag

OPEN = 0.2
CHAIN = 0.14
MENDED = 0.06
REFUSED = 0.03
NOT_FOUND = (
    "unknown {name} {value}, use {right}",
    "{name} {value} not found. Did you mean {right}?",
    "no {value}; try {right}",
)


@dataclass(frozen=True)
class Task:
    """A request's tool with its values, the tool after it or None, and whether the request names them."""

    tool: ServiceTool
    values: dict[str, Json]
    after: ServiceTool | None
    named: bool


def service_episode(
    rng: random.Random,
    held_out: bool = False,
    level: float = 1.0,
    requests: int | None = None,
    tools: int | None = None,
) -> Episode:
    """One to four requests to one service (held out: one), each with its calls and an answer. `level`, 0 to 1, is how wide
    the episodes are: tools, arguments and types; above 1, tools of more arguments are asked for. `requests` and `tools`
    fix these numbers."""
    bag = Bag(rng, held_out)
    service = draw_service(bag, size_at(bag, level, tools))
    drawn = Episode("service", [tool.schema() for tool in service])
    if rng.random() < 0.15:
        drawn.messages.append({"role": "system", "content": system_prompt(bag)})
    most = 1 if held_out else rng.choice([1, 2, 2, 3, 3, 4])
    for _ in range(requests or most):
        add_request(drawn, bag, service, held_out, demanding=level > 1)
    return drawn


def add_request(
    drawn: Episode, bag: Bag, tools: Sequence[ServiceTool], held_out: bool, demanding: bool = False
) -> None:
    """Appends a request and the conversation that serves it. `demanding`: to the one of two tools that takes more, with
    more of its optional arguments."""
    rng = bag.rng
    tool = rng.choice(tools)
    if demanding:
        tool = max(tool, rng.choice(tools), key=lambda each: 2 * len(each.required) + len(each.optional))
    values = draw_values(bag, tool, 0.55 if demanding else 0.35)
    named = not tool.required or rng.random() >= OPEN
    if not named:
        values = {each.name: values[each.name] for each in tool.required}
    takers = [
        each for each in tools if len(each.required) == 1 and each is not tool and each.required[0].shape == "one"
    ]
    after = rng.choice(takers) if named and takers and rng.random() < CHAIN else None
    mentions = [naming(rng, each, tools) for each in (tool, after) if each is not None] if named else []
    result = draw_result(bag, after)
    hints = [rng.choice(list(result))] if isinstance(result, dict) and len(result) > 1 and after is None else []
    tasks = [each.text for each in mentions]
    while not shown_in(values, said := request(bag, tasks, offers(bag, tool, values, named), hints, held_out)):
        pass  # an end mark or a comma was taken for a part of the sentence
    drawn.messages.append({"role": "user", "content": said})
    play(drawn, bag, tools, Task(tool, values, after, named), mentions, result, hints)


def draw_values(bag: Bag, tool: ServiceTool, share: float) -> dict[str, Json]:
    """Values for all required arguments, and for a share of the optional ones, in the order of the signature."""
    optional = [each for each in tool.optional if bag.rng.random() < share]
    return {each.name: each.draw(bag) for each in [*tool.required, *optional]}


def draw_result(bag: Bag, after: ServiceTool | None) -> Json:
    """A result: an object with what the next tool takes or other fields, a list, a number or a text."""
    rng = bag.rng
    kinds = rng.choices(list(KINDS), k=3)
    if after is not None:
        field = after.required[0]
        rest = {bag.draw(): KINDS[kinds[0]][1](bag)} if rng.random() < 0.4 else {}
        both = {**rest, field.name: field.draw(bag)}
        return dict(sorted(both.items(), key=lambda _: rng.random()))
    draw = rng.random()
    if draw < 0.55:
        return {bag.draw(): KINDS[kind][1](bag) for kind in kinds[: rng.choice([1, 1, 2, 3])]}
    if draw < 0.7:
        return [KINDS[kinds[0]][1](bag) for _ in range(rng.choice([1, 2, 2, 3]))]
    return KINDS[kinds[0]][1](bag)


def play(
    drawn: Episode,
    bag: Bag,
    tools: Sequence[ServiceTool],
    task: Task,
    mentions: Sequence[Naming],
    result: Json,
    hints: Sequence[str],
) -> None:
    """Appends the call, maybe an error and the mended call, the results, a following call, and the answer."""
    rng = bag.rng
    tool, values = task.tool, task.values
    opened = opening(tools, tool, mentions[0] if mentions else None)
    fitting = [tool] if task.named else [each for each in tools if names_of(each) == names_of(tool)]
    calls = tuple(call_text(tools, each, values, mentions[0] if mentions else None) for each in fitting)
    drawn.turns.append(Turn(calls, (), calling=1.0))
    draw = rng.random()
    wrong = [each for each in tool.required if each.shape == "one" and isinstance(values[each.name], str)]
    if draw < MENDED and wrong:
        values, error = mended(bag, rng.choice(wrong), values)
        drawn.messages += exchange(tool, task.values, opened, error)
        opened = opening(tools, tool, None)
        drawn.turns.append(Turn((call_text(tools, tool, values, None),), (), calling=1.0))
    elif draw < MENDED + REFUSED:
        result, hints = f"Error: {' '.join(bag.draw() for _ in range(rng.randint(1, 3)))}", []
    drawn.messages += exchange(tool, values, opened, rendered(rng, result))
    if task.after is not None and isinstance(result, dict):
        name = task.after.required[0].name
        taken = {name: result[name]}
        drawn.turns.append(Turn((call_text(tools, task.after, taken, mentions[1]),), (), calling=1.0))
        result, hints = draw_result(bag, None), []
        if isinstance(result, dict):
            result = dict([next(iter(result.items()))])
        drawn.messages += exchange(task.after, taken, opening(tools, task.after, mentions[1]), rendered(rng, result))
    answers = texts_of(result, hints)
    drawn.turns.append(Turn((), answers, calling=0.0))
    drawn.messages.append({"role": "assistant", "content": rng.choice(answers)})


def texts_of(result: Json, hints: Sequence[str]) -> tuple[str, ...]:
    """The answers that quote a result: the field asked for, all items of a list, or the whole text."""
    if isinstance(result, dict):
        shown = [result[hints[0]]] if hints else list(result.values())
        return tuple(dict.fromkeys(f"The answer is {spoken(each)}." for each in shown))
    return (f"The answer is {spoken(result)}.",)


def spoken(value: Json) -> str:
    """A value as an answer writes it."""
    return ", ".join(flat(value)) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)


def rendered(rng: random.Random, result: Json) -> str:
    """The text of a tool's message: JSON, plain text, or a list with an item in each line."""
    if isinstance(result, str):
        return result
    if isinstance(result, list) and rng.random() < 0.4:
        return "\n".join(str(each) for each in result)
    return json.dumps(result, indent=2) if rng.random() < 0.15 else json.dumps(result)


def mended(bag: Bag, field: Field, values: dict[str, Json]) -> tuple[dict[str, Json], str]:
    """The values with one put right, and the error that says so."""
    right = field.draw(bag)
    text = bag.rng.choice(NOT_FOUND).format(name=field.name, value=values[field.name], right=right)
    return {**values, field.name: right}, f"Error: {text}"


def names_of(tool: ServiceTool) -> tuple[str, ...]:
    """The names of the arguments that it requires."""
    return tuple(each.name for each in tool.required)


def opening(tools: Sequence[ServiceTool], tool: ServiceTool, named: Naming | None) -> str:
    """What the policy copies of a tool's line: from the word that names it to the end; if none does, the arguments that
    it requires, and the number."""
    number = f"<{tools.index(tool) + 1}>"
    if named is None:
        return ", ".join(names_of(tool)) + number
    return f"{tool.name[named.begin :]}{number}({signature(tool.schema()['function']['parameters'])})"


def call_text(tools: Sequence[ServiceTool], tool: ServiceTool, values: dict[str, Json], named: Naming | None) -> str:
    """The completion that calls a tool, as the chat template writes it: what it goes by, then the call."""
    call = f'{{"name": "{tool.name}", "arguments": {json.dumps(values)}}}'
    return completion(opening(tools, tool, named), call)


def exchange(tool: ServiceTool, values: dict[str, Json], opened: str, result: str) -> list[Message]:
    """An assistant's call and the tool's message."""
    call = {"type": "function", "function": {"name": tool.name, "arguments": json.dumps(values)}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": opened, "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]
