"""Episodes with services: requests with values of many kinds, results to quote or pass on, and errors after which a
call is corrected."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from offbook.base.types import Json, Message

from .episodes import Episode, Turn, completion, system_prompt
from .fields import KINDS, Field, flat, object_schema
from .service_requests import Naming, argument_phrases, clause, contains_value, naming, request
from .service_tools import ServiceTool, draw_service, signature, size_at
from .words import WordSource

OPEN_SHARE = 0.2
"""Share of requests that do not name their tool."""
CHAIN_SHARE = 0.14
"""Share of requests that name a second tool, which takes a field of the first tool's result."""
CORRECTED_SHARE = 0.06
"""Share of requests whose first call returns an error that names the right value."""
BARE_SHARE = 0.2
"""Share of the results for a second tool that are the value alone."""
ERROR_SHARE = 0.03
"""Share of requests whose result is an error that the answer quotes."""
SEVERAL_SHARE = 0.15
"""Share of requests for two or three calls that do not depend on each other."""
SAME_TOOL_SHARE = 0.35
"""Share of the further calls of such a request that are of the first call's tool."""
NOT_FOUND_ERRORS = (
    "unknown {name} {value}, use {right}",
    "{name} {value} not found. Did you mean {right}?",
    "no {value}; try {right}",
    "{value} is not a valid {name}: expected {right}",
    "{name} must be {right}",
)


@dataclass(frozen=True)
class Task:
    """What a request is about: a tool with its values, the tool that takes the result or None, and whether the request
    names them."""

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
    """One to four requests to one service (one when `held_out`), each with its calls and an answer.

    `level`, 0 to 1, is how many tools, arguments and types there are. Above 1, requests prefer tools with more
    arguments. `requests` and `tools` fix these numbers."""
    source = WordSource(rng, held_out)
    service = draw_service(source, size_at(source, level, tools))
    drawn = Episode("service", [tool.schema() for tool in service])
    if rng.random() < 0.15:
        drawn.messages.append({"role": "system", "content": system_prompt(source)})
    most = 1 if held_out else rng.choice([1, 2, 2, 3, 3, 4])
    for _ in range(requests or most):
        if rng.random() < SEVERAL_SHARE * min(1.0, level):
            add_request_for_several(drawn, source, service, held_out)
        else:
            add_request(drawn, source, service, held_out, demanding=level > 1)
    return drawn


def add_request(
    drawn: Episode, source: WordSource, tools: Sequence[ServiceTool], held_out: bool, demanding: bool = False
) -> None:
    """Append a request, its calls and an answer. `demanding`: of two drawn tools take the one with more arguments, and
    state more optional ones."""
    rng = source.rng
    tool = rng.choice(tools)
    if demanding:
        tool = max(tool, rng.choice(tools), key=lambda tool: 2 * len(tool.required) + len(tool.optional))
    values = draw_values(source, tool, 0.55 if demanding else 0.35)
    named = not tool.required or rng.random() >= OPEN_SHARE
    if not named:
        values = {field.name: values[field.name] for field in tool.required}
    takers = [
        other for other in tools if len(other.required) == 1 and other is not tool and other.required[0].shape == "one"
    ]
    after = rng.choice(takers) if named and takers and rng.random() < CHAIN_SHARE else None
    mentions = [naming(rng, target, tools) for target in (tool, after) if target is not None] if named else []
    result = draw_result(source, after)
    hints = [rng.choice(list(result))] if isinstance(result, dict) and len(result) > 1 and after is None else []
    tasks = [mention.text for mention in mentions]
    while not contains_value(
        values, text := request(source, tasks, argument_phrases(source, tool, values, named), hints, held_out)
    ):
        pass  # `finish` removed a comma or an end mark that belongs to a value: draw again
    drawn.messages.append({"role": "user", "content": text})
    add_calls_and_answer(drawn, source, tools, Task(tool, values, after, named), mentions, result, hints)


def add_request_for_several(drawn: Episode, source: WordSource, tools: Sequence[ServiceTool], held_out: bool) -> None:
    """Append a request for two or three independent calls, the calls one after another, and an answer with the results of
    all."""
    rng = source.rng
    steps = draw_steps(source, tools)
    mentions = [naming(rng, tool, tools) for tool, _ in steps]
    every = [values for _, values in steps]
    text = ""
    while not (text and contains_value(every, text)):  # `finish` removed a mark that belongs to a value: draw again
        clauses = [
            clause(source, mention, argument_phrases(source, tool, values, free=True))
            for mention, (tool, values) in zip(mentions, steps, strict=True)
        ]
        text = request(source, clauses, [], [], held_out)
    drawn.messages.append({"role": "user", "content": text})
    answers: list[str] = []
    for mention, (tool, values) in zip(mentions, steps, strict=True):
        drawn.turns.append(Turn((call_text(tools, tool, values, mention),), (), call_share=1.0))
        result = first_field(draw_result(source, None))
        drawn.messages += exchange(tool, values, thought_of(tools, tool, mention), rendered(rng, result))
        answers.append(answer_text(next(iter(result.values())) if isinstance(result, dict) else result))
    answer = f"The answer is {' and '.join(answers)}."
    drawn.turns.append(Turn((), (answer,), call_share=0.0))
    drawn.messages.append({"role": "assistant", "content": answer})


def draw_steps(source: WordSource, tools: Sequence[ServiceTool]) -> list[tuple[ServiceTool, dict[str, Json]]]:
    """Two or three different calls: each a tool with its values. Fewer if the tools take no arguments to differ in."""
    rng = source.rng
    first = rng.choice(tools)
    others = [first if rng.random() < SAME_TOOL_SHARE else rng.choice(tools) for _ in range(rng.choice([1, 1, 1, 2]))]
    steps: list[tuple[ServiceTool, dict[str, Json]]] = []
    for tool in (first, *others):
        step = (tool, draw_values(source, tool, 0.2))
        if step not in steps:
            steps.append(step)
    return steps


def first_field(result: Json) -> Json:
    """An object with its first field alone; any other result as it is."""
    return dict([next(iter(result.items()))]) if isinstance(result, dict) else result


def draw_values(source: WordSource, tool: ServiceTool, share: float) -> dict[str, Json]:
    """Values for all required arguments, and for a share of the optional ones, in the order of the signature."""
    optional = [field for field in tool.optional if source.rng.random() < share]
    return {field.name: field.draw(source) for field in [*tool.required, *optional]}


def draw_result(source: WordSource, after: ServiceTool | None) -> Json:
    """A result: the value of the argument of `after`, or an object with it; or for None, an object, a list, a number or a
    string."""
    rng = source.rng
    kinds = rng.choices(list(KINDS), k=3)
    if after is not None:
        field = after.required[0]
        if rng.random() < BARE_SHARE:
            return field.draw(source)
        rest = {source.draw(): KINDS[kinds[0]][1](source)} if rng.random() < 0.4 else {}
        both = {**rest, field.name: field.draw(source)}
        return dict(sorted(both.items(), key=lambda _: rng.random()))
    draw = rng.random()
    if draw < 0.55:
        return {source.draw(): KINDS[kind][1](source) for kind in kinds[: rng.choice([1, 1, 2, 3])]}
    if draw < 0.7:
        return [KINDS[kinds[0]][1](source) for _ in range(rng.choice([1, 2, 2, 3]))]
    return KINDS[kinds[0]][1](source)


def add_calls_and_answer(
    drawn: Episode,
    source: WordSource,
    tools: Sequence[ServiceTool],
    task: Task,
    mentions: Sequence[Naming],
    result: Json,
    hints: Sequence[str],
) -> None:
    """Append the call, possibly an error and the corrected call, the result, possibly the second tool's call, and the
    answer. `hints`: the field of the result that the request names."""
    rng = source.rng
    tool, values, after = task.tool, task.values, task.after
    thought = thought_of(tools, tool, mentions[0] if mentions else None)
    fitting = [tool] if task.named else [other for other in tools if required_schema(other) == required_schema(tool)]
    calls = tuple(call_text(tools, other, values, mentions[0] if mentions else None) for other in fitting)
    drawn.turns.append(Turn(calls, (), call_share=1.0))
    draw = rng.random()
    wrong = [field for field in tool.required if field.shape == "one" and isinstance(values[field.name], str)]
    if draw < CORRECTED_SHARE and wrong:
        values, error = corrected(source, rng.choice(wrong), values)
        drawn.messages += exchange(tool, task.values, thought, error)
        thought = thought_of(tools, tool, None)
        drawn.turns.append(Turn((call_text(tools, tool, values, None),), (), call_share=1.0))
    elif draw < CORRECTED_SHARE + ERROR_SHARE:
        result, hints = f"Error: {' '.join(source.draw() for _ in range(rng.randint(1, 3)))}", []
        after = None
    drawn.messages += exchange(tool, values, thought, rendered(rng, result))
    if after is not None:
        name = after.required[0].name
        taken = {name: result[name] if isinstance(result, dict) else result}
        drawn.turns.append(Turn((call_text(tools, after, taken, mentions[1]),), (), call_share=1.0))
        result, hints = first_field(draw_result(source, None)), []
        drawn.messages += exchange(after, taken, thought_of(tools, after, mentions[1]), rendered(rng, result))
    answers = answers_to(result, hints)
    drawn.turns.append(Turn((), answers, call_share=0.0))
    drawn.messages.append({"role": "assistant", "content": rng.choice(answers)})


def answers_to(result: Json, hints: Sequence[str]) -> tuple[str, ...]:
    """The right answers to a result: the named field, else one answer per field; all items of a list; or the whole
    string."""
    if isinstance(result, dict):
        shown = [result[hints[0]]] if hints else list(result.values())
        return tuple(dict.fromkeys(f"The answer is {answer_text(value)}." for value in shown))
    return (f"The answer is {answer_text(result)}.",)


def answer_text(value: Json) -> str:
    """A value as an answer writes it.

    >>> answer_text(["a", 2]), answer_text(7), answer_text("ok")
    ('a, 2', '7', 'ok')
    """
    return ", ".join(flat(value)) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)


def rendered(rng: random.Random, result: Json) -> str:
    """The text of a tool message: JSON, plain text, or a line per field or item."""
    if isinstance(result, str):
        return result
    if isinstance(result, dict) and rng.random() < 0.12:
        return "\n".join(f"{name}: {answer_text(value)}" for name, value in result.items())
    if isinstance(result, list) and rng.random() < 0.4:
        return "\n".join(str(item) for item in result)
    return json.dumps(result, indent=2) if rng.random() < 0.15 else json.dumps(result)


def corrected(source: WordSource, field: Field, values: dict[str, Json]) -> tuple[dict[str, Json], str]:
    """The values with a new one for `field`, and the error message that names it."""
    right = field.draw(source)
    text = source.rng.choice(NOT_FOUND_ERRORS).format(name=field.name, value=values[field.name], right=right)
    return {**values, field.name: right}, f"Error: {text}"


def required_names(tool: ServiceTool) -> tuple[str, ...]:
    """The names of the arguments that a tool requires."""
    return tuple(field.name for field in tool.required)


def required_schema(tool: ServiceTool) -> Json:
    """The JSON Schema of the arguments that a tool requires."""
    return object_schema(tool.required, ())


def thought_of(tools: Sequence[ServiceTool], tool: ServiceTool, named: Naming | None) -> str:
    """The part of the tool's line in the system prompt that the policy copies before the call.

    If the request names the tool: from the naming word to the end of the line. Else: the required arguments and the
    tool's number."""
    number = f"<{tools.index(tool) + 1}>"
    if named is None:
        return ", ".join(required_names(tool)) + number
    return f"{tool.name[named.begin :]}{number}({signature(tool.schema()['function']['parameters'])})"


def call_text(tools: Sequence[ServiceTool], tool: ServiceTool, values: dict[str, Json], named: Naming | None) -> str:
    """The completion that calls a tool: the thought, then the call."""
    call = f'{{"name": "{tool.name}", "arguments": {json.dumps(values)}}}'
    return completion(thought_of(tools, tool, named), call)


def exchange(tool: ServiceTool, values: dict[str, Json], thought: str, result: str) -> list[Message]:
    """An assistant's call and the tool's message."""
    call = {"type": "function", "function": {"name": tool.name, "arguments": json.dumps(values)}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]
