"""Scenarios: a task on a server's tools and how its result is checked; their files, one scenario per line; and their splits.

The splits for training and evaluation share no combination of a tool and its arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbook.base.errors import ConfigError, StoreError
from offbook.base.text import one_line
from offbook_mcp.tools.result_values import with_scalars


class CheckKind(StrEnum):
    """How a rollout of a scenario is scored."""

    ANSWER = "answer"  # the reference calls, and the values that the final answer must contain
    CALLS = "calls"  # the reference calls only: what the server answers changes with time
    JUDGE = "judge"  # nothing can be executed: an LLM judge compares the rollouts


class ReferenceCall(BaseModel):
    """One call of the solution; `tool` is the name that the model sees.

    `returned` is a hash of what the call returns, if arguments in a language such as SQL are compared by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str
    arguments: Mapping[str, object] = Field(default_factory=dict[str, object])
    returned: str = ""


class McpScenario(BaseModel):
    """A task in a user's words with its reference solution. One line of a scenario file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    task: str = Field(min_length=1)
    difficulty: int = Field(ge=1, le=5)
    tools: tuple[str, ...]  # that the solution uses, each once, in order of first use
    check: CheckKind
    calls: tuple[ReferenceCall, ...] = ()  # empty for CheckKind.JUDGE
    answer: tuple[str, ...] = ()  # values that the final answer must contain; for CheckKind.ANSWER
    split: Literal["train", "eval"] = "train"
    source: Literal["schemas", "llm", "user"] = "schemas"
    recipe: str = ""  # for people: the template, or the model that wrote it
    server: str = ""  # fingerprint of the servers that it was validated on


@dataclass(frozen=True)
class ScenarioSet:
    """Scenarios of one target.

    `fingerprint` identifies the servers on which they were validated. `dropped` counts the rejected candidates by reason, and
    `examples` has an answer of the server for some reasons; they are not saved.
    """

    scenarios: tuple[McpScenario, ...]
    fingerprint: str
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    examples: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def train(self) -> tuple[McpScenario, ...]:
        """The scenarios for training."""
        return tuple(scenario for scenario in self.scenarios if scenario.split == "train")

    @property
    def eval(self) -> tuple[McpScenario, ...]:
        """The held-out scenarios."""
        return tuple(scenario for scenario in self.scenarios if scenario.split == "eval")

    @property
    def digest(self) -> str:
        """SHA-256 of the file that `save_scenarios` writes."""
        return hashlib.sha256(_text(self.scenarios).encode()).hexdigest()

    def server_change(self, fingerprint: str) -> str | None:
        """A warning if `fingerprint` differs from that of the servers on which the scenarios were validated; else None."""
        if not self.fingerprint or self.fingerprint == fingerprint:
            return None
        return (
            f"the server has changed since these scenarios were made: its fingerprint was {self.fingerprint} and is now "
            f"{fingerprint}. They may no longer be solvable; `offbook mcp scenarios` makes new ones"
        )


def save_scenarios(scenarios: ScenarioSet, path: str | Path) -> None:
    """Write the file atomically: it is the old or the new, whole. Raises StoreError, as for a full disk."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, _text(scenarios.scenarios))
    except OSError as error:
        raise StoreError(f"scenarios: {str(path)!r} cannot be written: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load_scenarios(path: str | Path) -> ScenarioSet:
    """Read the scenarios of a file. Raises ConfigError, which names the line and the field."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"scenarios: there is no file {str(path)!r}; make it with `offbook mcp scenarios TARGET -o {path}`"
        ) from error
    except OSError as error:
        raise ConfigError(f"scenarios: {str(path)!r} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    scenarios = tuple(_scenario(line, f"{path.name}, line {number}") for number, line in numbered)
    if not scenarios:
        raise ConfigError(
            f"scenarios: {str(path)!r} holds no scenario; make some with `offbook mcp scenarios TARGET -o {path}`"
        )
    for name, count in Counter(scenario.id for scenario in scenarios).items():
        if count > 1:
            raise ConfigError(f"{path.name}: {count} lines have the id {name!r}; each scenario needs its own")
    servers = sorted({scenario.server for scenario in scenarios if scenario.server})
    if len(servers) > 1:
        raise ConfigError(
            f"{path.name}, field server: lines belong to different servers, {servers[0]} and {servers[1]}"
        )
    return ScenarioSet(scenarios, servers[0] if servers else "")


def _scenario(line: bytes, place: str) -> McpScenario:
    try:
        return McpScenario.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ", field " + ".".join(str(part) for part in first["loc"]) if first["loc"] else ""
        raise ConfigError(f"{place}{where}: {first['msg']}, got {one_line(repr(first['input']), 80)}") from error


def _text(scenarios: tuple[McpScenario, ...]) -> str:
    """The file's content, in ASCII: a server's text cannot break a line or control the reader's terminal."""
    return "".join(json.dumps(scenario.model_dump(mode="json")) + "\n" for scenario in scenarios)


HELD_OUT = 0.25
"""Share of the scenarios to evaluate on."""


def combination(call: ReferenceCall) -> str:
    """A key for a tool and its arguments that ignores letter case, white space, the order of keys, and 3 versus 3.0."""
    return json.dumps([call.tool, normalised(call.arguments)], sort_keys=True)


def normalised(value: object) -> object:
    """Normalise a value so that equivalent arguments compare equal."""
    return with_scalars(value, _normalised_scalar)


def _normalised_scalar(value: object) -> object:
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def combinations(scenario: McpScenario) -> frozenset[str]:
    """The combinations of a scenario's calls; its task if it has no calls.

    A call without arguments counts only if no call has any: there is nothing in it that could be held out.
    """
    if not scenario.calls:
        return frozenset([json.dumps(["", normalised(scenario.task)])])
    with_arguments = [call for call in scenario.calls if call.arguments]
    return frozenset(combination(call) for call in with_arguments or scenario.calls)


def number_held_out(count: int, held_out: float) -> int:
    """The number of `count` scenarios for evaluation: the share `held_out`, and one of two at least."""
    return max(round(held_out * count), int(held_out > 0 and count > 1))


def split_scenarios(
    scenarios: Iterable[McpScenario], *, held_out: float = HELD_OUT, seed: int = 0
) -> tuple[McpScenario, ...]:
    """Assign every scenario to the train or the eval split; about the share `held_out` is eval. The order stays.

    Scenarios with a combination of each split are left out, at most half of all. Every tool keeps a scenario to train on; first,
    every tool gets one to evaluate on where that leaves it one.
    """
    scenarios = tuple(scenarios)
    keys = [combinations(scenario) for scenario in scenarios]
    tools = Counter(tool for scenario in scenarios for tool in scenario.tools)
    holders = Counter(key for own in keys for key in own)
    order = list(range(len(scenarios)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda index: sum(holders[key] - 1 for key in keys[index]))  # stable: those that share none first
    wanted = number_held_out(len(scenarios), held_out)
    held: frozenset[str] = frozenset()
    evaluation: list[int] = []

    def parts(held: frozenset[str]) -> tuple[list[int], list[int]]:
        return [i for i in order if keys[i].isdisjoint(held)], [i for i in order if keys[i] <= held]

    def try_to_hold(index: int, most: int) -> None:
        nonlocal held, evaluation
        more = held | keys[index]
        train, now = parts(more)
        trained = {tool for number in train for tool in scenarios[number].tools}
        if trained == tools.keys() and len(now) <= most and 2 * (len(train) + len(now)) >= len(scenarios):
            held, evaluation = more, now

    for tool in sorted(tools, key=lambda name: (tools[name], name)) if wanted else ():
        for index in order:
            if not any(tool in scenarios[number].tools for number in evaluation) and tool in scenarios[index].tools:
                try_to_hold(index, len(scenarios))
    for index in order:
        if len(evaluation) < wanted:
            try_to_hold(index, wanted)
    splits = {**dict.fromkeys(parts(held)[0], "train"), **dict.fromkeys(evaluation, "eval")}
    return tuple(scenarios[index].model_copy(update={"split": splits[index]}) for index in sorted(splits))


_SHARES = {1: 0.32, 2: 0.3, 3: 0.16, 4: 0.15, 5: 0.07}
"""Target shares of the difficulties."""
_MAX_WITHOUT_ARGUMENTS = 3


def select(scenarios: Sequence[McpScenario], count: int, rng: random.Random) -> list[McpScenario]:
    """Select up to `count` scenarios: first of tools that have none yet, then spread over tools and difficulties.

    At most _MAX_WITHOUT_ARGUMENTS share a call without arguments, since they all end up in the same split.
    """
    waiting = list(scenarios)
    rng.shuffle(waiting)
    tools: Counter[str] = Counter()
    difficulties: Counter[int] = Counter()
    bare: Counter[str] = Counter()
    chosen: list[McpScenario] = []

    def cost(scenario: McpScenario) -> tuple[bool, float]:
        rarest = min((tools[tool] for tool in scenario.tools), default=0)
        busiest = max((tools[tool] for tool in scenario.tools), default=0)
        common = difficulties[scenario.difficulty] / (len(_SHARES) * _SHARES[scenario.difficulty])
        return rarest > 0, rarest + 0.3 * busiest + common

    while waiting and len(chosen) < count:
        best = min(waiting, key=cost)
        waiting.remove(best)
        empty = [key for key in combinations(best) if key.endswith(", {}]")]
        if any(bare[key] >= _MAX_WITHOUT_ARGUMENTS for key in empty):
            continue
        bare.update(empty)
        tools.update(best.tools)
        difficulties[best.difficulty] += 1
        chosen.append(best)
    return chosen
