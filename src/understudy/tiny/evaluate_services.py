"""Measures the policy on services: `python -m understudy.tiny.evaluate_services`."""

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

from ..types import Json
from . import path
from .episodes import Episode, Turn
from .evaluate import Probe, call_of, complete, load, probes, single, tool_of
from .services import service_episode
from .tokenizer import render

SIZES = (2, 8, 16)
VALUES = (
    ("address", re.compile(r"https?://|\S@\S+\.")),
    ("date or time", re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d")),
    ("with a slash", re.compile(r"/")),
    ("several words", re.compile(r" ")),
    ("with other marks", re.compile(r"[^A-Za-z0-9]|\d")),
    ("one word", re.compile(r"")),
)
"""Kinds of text, by the first pattern that matches."""


@dataclass(frozen=True)
class FirstCalls:
    """Of `asked` first calls, the shares that are right (tool, arguments and values), greedy and sampled at temperature 1,
    and the share whose tool is right, greedy."""

    asked: int
    greedy: float
    sampled: float
    tool: float


def kinds_of(values: dict[str, Json]) -> set[str]:
    """The kinds of value among a call's arguments."""
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


def labels(drawn: Episode, turn: Turn) -> list[str]:
    """The rows of the table in which a first call counts."""
    values: dict[str, Json] = json.loads(turn.calls[0].split("<tool_call>\n")[1].split("\n")[0])["arguments"]
    count = len(values)
    size = f"{len(drawn.tools)} tools"
    number = "3 or more arguments" if count > 2 else f"{count} argument{'s' if count != 1 else ''}"
    return ["all", size, number, *sorted(kinds_of(values))]


def measure_services(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool = True
) -> dict[str, FirstCalls]:
    """First calls that one completion alone serves, by the number of tools and arguments and by kind of value."""
    rng = random.Random(f"{seed} {held_out}")
    drawn = [service_episode(rng, held_out, tools=SIZES[index % len(SIZES)], requests=1) for index in range(count)]
    pairs = [(one, probes(tokenizer, one)[0]) for one in drawn]
    pairs = [(one, asked) for one, asked in pairs if single(asked.turn)]
    return table(model, tokenizer, [(asked, labels(one, asked.turn)) for one, asked in pairs], seed)


def table(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[tuple[Probe, list[str]]], seed: int
) -> dict[str, FirstCalls]:
    """A score for each label, over the probes that carry it."""
    prompts = [probe.prompt for probe, _ in asked]
    greedy, sampled = (complete(model, tokenizer, prompts, mode, seed) for mode in (False, True))
    rows: dict[str, list[tuple[bool, bool, bool]]] = {}
    for (probe, names), first, second in zip(asked, greedy, sampled, strict=True):
        right = {canonical(call) for call in probe.turn.calls}
        tools = {tool_of(canonical(call)) for call in probe.turn.calls}
        hits = (canonical(first) in right, canonical(second) in right, tool_of(canonical(first)) in tools)
        for name in names:
            rows.setdefault(name, []).append(hits)
    return {
        name: FirstCalls(len(hits), *(mean(each[place] for each in hits) for place in range(3)))
        for name, hits in sorted(rows.items(), key=lambda row: (row[0] != "all", row[0]))
    }


def canonical(completion: str) -> str:
    """A completion's call as JSON with sorted keys, its tool first; the completion itself if it is no call."""
    body = re.search(r"<tool_call>\n(.*)\n</tool_call>$", call_of(completion))
    try:
        call = json.loads(body[1]) if body else None
    except ValueError:
        return completion
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:  # pyright: ignore[reportUnknownArgumentType]  # JSON
        return completion
    return f'{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"], sort_keys=True)}}}'


def server_probes(tokenizer: PreTrainedTokenizerBase, file: Path) -> list[tuple[Probe, list[str]]]:
    """Probes of a file with a server's `tools` and `requests`: each the user's text and the right call."""
    server: Json = json.loads(file.read_text(encoding="utf-8"))
    tools = [{"type": "function", "function": tool} for tool in server["tools"]]
    asked: list[tuple[Probe, list[str]]] = []
    for each in server["requests"]:
        call = f"<tool_call>\n{json.dumps({'name': each['name'], 'arguments': each['arguments']})}\n</tool_call>"
        prompt = render(tokenizer, [{"role": "user", "content": each["request"]}], tools, prompt=True)
        asked.append((Probe(prompt, Turn((call,), (), calling=1.0), first=True), [file.stem]))
    return asked


def report(title: str, rows: dict[str, FirstCalls]) -> str:
    """The scores as lines."""
    lines = [
        f"  {name:<20} {each.asked:4} first calls   greedy {each.greedy:6.1%}   sampled {each.sampled:6.1%}   "
        f"tool alone {each.tool:6.1%}"
        for name, each in rows.items()
    ]
    return "\n".join([title, *lines])


def main() -> None:
    """Prints the table of held-out services, and one of each server's requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path())
    parser.add_argument("--count", type=int, default=400, help="held-out episodes; 0: none")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--servers", type=Path, nargs="*", default=[], help="files with a server's tools and requests")
    options = parser.parse_args()
    model, tokenizer = load(options.folder)
    if options.count:
        print(report("held-out services", measure_services(model, tokenizer, options.count, options.seed)), flush=True)
    asked = [each for file in options.servers for each in server_probes(tokenizer, file)]
    if asked:
        print(report("requests to real tools", table(model, tokenizer, asked, options.seed)))


if __name__ == "__main__":
    main()
