"""Scenarios: a task on a server's tools and how its result is checked; their files, one scenario per line; and their splits.

The splits for training and evaluation share no combination of a tool and its arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbook.base.errors import ConfigError, StoreError
from offbook.base.text import one_line


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
        fields = cast(object, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    try:
        return McpScenario.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ConfigError(
            f"{place}, field {where}: {first['msg']}, got {one_line(repr(first['input']), 80)}"
        ) from error


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
    if isinstance(value, str):
        return " ".join(value.split()).casefold()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: normalised(item) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, list | tuple):
        return [normalised(item) for item in cast(Sequence[object], value)]
    return value


def combinations(scenario: McpScenario) -> frozenset[str]:
    """The combinations of a scenario's calls; its task if it has no calls.

    A call without arguments counts only if no call has any: there is nothing in it that could be held out.
    """
    if not scenario.calls:
        return frozenset([json.dumps(["", normalised(scenario.task)])])
    with_arguments = [call for call in scenario.calls if call.arguments]
    return frozenset(combination(call) for call in with_arguments or scenario.calls)


def without_joints(scenarios: Sequence[McpScenario], held_out: float) -> list[McpScenario]:
    """Remove scenarios that join calls which could be held out to those of all others, as few as are needed.

    If a tool accepts few values, tasks with several calls soon join all of them, and nothing could be held out. To hold out
    something of every tool, at most two thirds are removed; to reach the share `held_out`, at most one third.
    """
    kept = list(scenarios)
    while held_out:
        wanted = number_held_out(len(kept), held_out)
        eval_indices = _held_out(kept, _families(kept), wanted)
        missing = {tool for scenario in kept for tool in scenario.tools}
        missing -= {tool for index in eval_indices for tool in kept[index].tools}
        if not missing and len(eval_indices) >= 0.8 * wanted:
            break
        joints = _cheapest_joints(kept, missing)
        removed = len(scenarios) - len(kept) + len(joints)
        if not joints or 3 * removed > (2 if missing else 1) * len(scenarios):
            break
        kept = [scenario for index, scenario in enumerate(kept) if index not in joints]
    return kept


def number_held_out(count: int, held_out: float) -> int:
    """The number of `count` scenarios for evaluation: the share `held_out`, and one of two at least."""
    return max(round(held_out * count), int(held_out > 0 and count > 1))


def _cheapest_joints(scenarios: Sequence[McpScenario], tools: set[str]) -> set[int]:
    """The fewest scenarios that join a combination to others, of those that also have a scenario of their own.

    Combinations of `tools` come first. Empty if there is no such combination: none whose removal leaves every tool a scenario.
    """
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for index, scenario in enumerate(scenarios):
        for key in combinations(scenario):
            holders[key].add(index)
    alone = {next(iter(keys)) for scenario in scenarios if len(keys := combinations(scenario)) == 1}
    joints = {
        key: {index for index in holders[key] if len(combinations(scenarios[index])) > 1} for key in sorted(alone)
    }
    uses = Counter(tool for scenario in scenarios for tool in scenario.tools)
    choices = {
        key: indices
        for key, indices in joints.items()
        if indices
        and uses.keys() == (uses - Counter(tool for index in indices for tool in scenarios[index].tools)).keys()
    }
    wanted = {key: indices for key, indices in choices.items() if json.loads(key)[0] in tools} or choices
    return min(wanted.values(), key=len, default=set[int]())


def split_scenarios(
    scenarios: Iterable[McpScenario], *, held_out: float = HELD_OUT, seed: int = 0
) -> tuple[McpScenario, ...]:
    """Assign every scenario to the train or the eval split; about the share `held_out` is eval. The order stays.

    A tool is in both splits if it has scenarios that share no combination; else it is in train only.
    """
    scenarios = tuple(scenarios)
    families = _families(scenarios)
    random.Random(seed).shuffle(families)
    families.sort(key=len)  # stable: small ones first, in random order
    eval_indices = _held_out(scenarios, families, number_held_out(len(scenarios), held_out))
    return tuple(
        scenario.model_copy(update={"split": "eval" if index in eval_indices else "train"})
        for index, scenario in enumerate(scenarios)
    )


def _families(scenarios: Sequence[McpScenario]) -> list[list[int]]:
    """Groups of indices of scenarios that share a combination, directly or through others (union-find)."""
    parent = list(range(len(scenarios)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, scenario in enumerate(scenarios):
        for key in combinations(scenario):
            parent[root(index)] = root(first.setdefault(key, index))
    families: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(scenarios)):
        families[root(index)].append(index)
    return list(families.values())


def _held_out(scenarios: Sequence[McpScenario], families: list[list[int]], wanted: int) -> set[int]:
    """Indices of the eval split: first a family per tool, the rarest tool first, then more up to `wanted`."""
    tools = [{tool for index in family for tool in scenarios[index].tools} for family in families]
    in_train = Counter(tool for names in tools for tool in names)
    covered: set[str] = set()
    chosen: set[int] = set()

    def free(number: int) -> bool:
        return number not in chosen and all(in_train[tool] > 1 for tool in tools[number])

    def choose(number: int) -> None:
        chosen.add(number)
        covered.update(tools[number])
        in_train.subtract(tools[number])

    size = 0
    for tool in sorted(in_train, key=lambda name: (in_train[name], name)):
        if wanted and tool not in covered:
            number = next((n for n, names in enumerate(tools) if tool in names and free(n)), None)
            if number is not None:
                choose(number)
    size = sum(len(families[number]) for number in chosen)
    for number, family in enumerate(families):
        if free(number) and size + len(family) <= wanted:
            choose(number)
            size += len(family)
    return {index for number in chosen for index in families[number]}
