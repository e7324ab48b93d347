"""Measures a policy on services: `python -m policies.evaluate_services`."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Values are JSON, which has partial types.

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from offbook.base.types import Json
from offbook.tiny import path

from .episodes import Episode, Turn
from .evaluate import EvaluationPrompt, call_of, complete, evaluation_prompts, load, single, tool_of
from .fields import UNITS
from .services import service_episode
from .tokenizer import render

LATER = "calls after a result"
SERVICE_TOKENS = 384
"""The longest completion. A call with objects and its thought can need over 300 tokens."""
SIZES = (2, 8, 16)
"""Numbers of tools in the measured services."""
VALUES = (
    ("URL", re.compile(r"https?://")),
    ("e-mail address", re.compile(r"\S@\S+\.")),
    ("date or time", re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d")),
    ("number with a unit", re.compile(rf"\d ?({'|'.join(UNITS)})$")),
    ("with a slash", re.compile(r"/")),
    ("several words", re.compile(r" ")),
    ("with other marks", re.compile(r"[^A-Za-z0-9]|\d")),
    ("one word", re.compile(r"")),
)
"""Kinds of string value. A value counts for the first pattern that matches."""


@dataclass(frozen=True)
class FirstCalls:
    """Shares of right first calls among `count`, greedy and sampled at temperature 1. A call is right when its tool,
    arguments and values are. `tool`: greedy, the share with the right tool."""

    count: int
    greedy: float
    sampled: float
    tool: float


def kinds_of(values: dict[str, Json]) -> set[str]:
    """The kinds of value among a call's arguments.

    >>> sorted(kinds_of({"path": "/srv", "all": True}))
    ['flag', 'with a slash']
    """
    kinds: set[str] = set()
    for value in values.values():
        if isinstance(value, bool):
            kinds.add("flag")
        elif isinstance(value, (int, float)):
            kinds.add("number")
        elif isinstance(value, list):
            kinds.add("list of objects" if value and isinstance(value[0], dict) else "list")
        elif isinstance(value, dict):
            kinds.add("object")
        else:
            kinds.add(next(name for name, pattern in VALUES if pattern.search(str(value))))
    return kinds


def row_names(drawn: Episode, turn: Turn) -> list[str]:
    """The rows of the table in which an episode's first call counts."""
    call: Json = json.loads(turn.calls[0].split("<tool_call>\n")[1].split("\n")[0])
    tool = next(tool["function"] for tool in drawn.tools if tool["function"]["name"] == call["name"])
    choices = {name for name, schema in tool["parameters"]["properties"].items() if "enum" in schema}
    values: dict[str, Json] = call["arguments"]
    kinds = kinds_of({name: value for name, value in values.items() if name not in choices})
    kinds |= {"choice"} if choices & set(values) else set()
    count = len(values)
    size = f"{len(drawn.tools)} tools"
    number = "3 or more arguments" if count > 2 else f"{count} argument{'s' if count != 1 else ''}"
    return ["all", size, number, *sorted(kinds)]


def measure_services(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool = True
) -> dict[str, FirstCalls]:
    """Row -> scores, on the prompts of `service_prompts`."""
    return table(model, tokenizer, service_prompts(tokenizer, count, seed, held_out), seed)


def service_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool = True
) -> list[tuple[EvaluationPrompt, list[str]]]:
    """The prompts for a call in `count` episodes with 2, 8 and 16 tools in turn, each with its rows: the first ones, and
    in a row of their own those after a result. Only those with exactly one right completion count."""
    rng = random.Random(f"{seed} {held_out}")
    drawn = [service_episode(rng, held_out, tools=SIZES[index % len(SIZES)], requests=1) for index in range(count)]
    pairs = [(one, prompt) for one in drawn for prompt in evaluation_prompts(tokenizer, one) if prompt.turn.calls]
    return [
        (prompt, row_names(one, prompt.turn) if prompt.first else [LATER])
        for one, prompt in pairs
        if single(prompt.turn)
    ]


def table(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[EvaluationPrompt, list[str]]],
    seed: int,
) -> dict[str, FirstCalls]:
    """Row -> scores, over the prompts that name the row. `all` is the first row."""
    texts = [prompt.text for prompt, _ in prompts]
    greedy, sampled = (complete(model, tokenizer, texts, mode, seed, SERVICE_TOKENS) for mode in (False, True))
    rows: dict[str, list[tuple[bool, bool, bool]]] = {}
    for (prompt, names), first, second in zip(prompts, greedy, sampled, strict=True):
        tools = {tool_of(canonical(call)) for call in prompt.turn.calls}
        hits = (is_right(first, prompt), is_right(second, prompt), tool_of(canonical(first)) in tools)
        for name in names:
            rows.setdefault(name, []).append(hits)
    return {
        name: FirstCalls(len(hits), *(mean(hit[place] for hit in hits) for place in range(3)))
        for name, hits in sorted(rows.items(), key=lambda row: (row[0] != "all", row[0]))
    }


def is_right(completion: str, prompt: EvaluationPrompt) -> bool:
    """Whether a completion's call is a right one, whatever the order of its arguments."""
    return canonical(completion) in {canonical(call) for call in prompt.turn.calls}


def canonical(completion: str) -> str:
    """The call of a completion as JSON with sorted keys, its tool first. The completion itself if it has no call that
    parses."""
    body = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", call_of(completion))
    try:
        call = json.loads(body[1]) if body else None
    except ValueError:
        return completion
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:  # pyright: ignore[reportUnknownArgumentType]  # JSON
        return completion
    return f'{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], sort_keys=True)}}}'


def server_prompts(tokenizer: PreTrainedTokenizerBase, file: Path) -> list[tuple[EvaluationPrompt, list[str]]]:
    """The requests of a JSON file: the prompt with its right call, and the file's name as the row. The file has a
    server's `tools` and `requests`, each with `request`, `name` and `arguments`."""
    server: Json = json.loads(file.read_text(encoding="utf-8"))
    tools = [{"type": "function", "function": tool} for tool in server["tools"]]
    prompts: list[tuple[EvaluationPrompt, list[str]]] = []
    for request in server["requests"]:
        call = f"<tool_call>\n{json.dumps({'name': request['name'], 'arguments': request['arguments']})}\n</tool_call>"
        text = render(tokenizer, [{"role": "user", "content": request["request"]}], tools, prompt=True)
        prompts.append((EvaluationPrompt(text, Turn((call,), (), call_share=1.0), first=True), [file.stem]))
    return prompts


def report(title: str, rows: dict[str, FirstCalls]) -> str:
    """The table as text: a line per row."""
    lines = [
        f"  {name:<20} {score.count:4} first calls   greedy {score.greedy:6.1%}   sampled {score.sampled:6.1%}   "
        f"tool alone {score.tool:6.1%}"
        for name, score in rows.items()
    ]
    return "\n".join([title, *lines])


def main() -> None:
    """Print the table of held-out services, and that of each server's requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path("tiny-mcp"), help="folder of the policy")
    parser.add_argument("--count", type=int, default=400, help="number of held-out episodes; 0: skip them")
    parser.add_argument("--seed", type=int, default=11, help="seed of the episodes and of sampling")
    parser.add_argument(
        "--servers", type=Path, nargs="*", default=[], help="JSON files with a server's tools and requests"
    )
    options = parser.parse_args()
    model, tokenizer = load(options.folder)
    if options.count:
        print(report("held-out services", measure_services(model, tokenizer, options.count, options.seed)), flush=True)
    prompts = [prompt for file in options.servers for prompt in server_prompts(tokenizer, file)]
    if prompts:
        print(report("requests to real tools", table(model, tokenizer, prompts, options.seed)))


if __name__ == "__main__":
    main()
