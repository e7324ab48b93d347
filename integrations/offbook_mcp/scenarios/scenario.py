"""Scenarios: a task on a server's tools and how its result is checked; and their files, one scenario per line."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
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
