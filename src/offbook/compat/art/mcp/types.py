"""Stands for `art.mcp.types`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from offbook.base.terminal import echo


@dataclass
class MCPTool:
    """A tool as the writer is shown it."""

    name: str
    description: str
    parameters: dict[str, Any]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MCPTool:
        """Missing fields are empty."""
        return cls(data.get("name", ""), data.get("description", ""), data.get("parameters", {}))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass
class MCPResource:
    """A resource as the writer is shown it."""

    uri: str
    name: str
    description: str
    mime_type: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MCPResource:
        """Takes `mimeType`, as MCP writes it, or `mime_type`; missing fields are empty."""
        mime_type = data.get("mimeType") or data.get("mime_type")
        return cls(data.get("uri", ""), data.get("name", ""), data.get("description", ""), mime_type)

    def to_dict(self) -> dict[str, Any]:
        """The fields as MCP names them."""
        fields = {"uri": self.uri, "name": self.name, "description": self.description}
        return fields | ({"mimeType": self.mime_type} if self.mime_type else {})


@dataclass
class GeneratedScenario:
    """A task, and how hard it is, from 1 to 5. Raises ValueError for another difficulty."""

    task: str
    difficulty: int

    def __post_init__(self) -> None:
        if isinstance(self.difficulty, bool) or self.difficulty not in (1, 2, 3, 4, 5):
            raise ValueError(f"difficulty: an integer from 1 to 5 is needed, got {self.difficulty!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GeneratedScenario:
        """Raises KeyError for a missing field."""
        return cls(data["task"], data["difficulty"])

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def preview(self, max_length: int = 120) -> str:
        """The task, cut to this length."""
        return self.task if len(self.task) <= max_length else f"{self.task[:max_length].strip()}…"


class GeneratedScenarioCollection:
    """Scenarios in an order."""

    def __init__(self, scenarios: Sequence[GeneratedScenario]) -> None:
        self.scenarios = list(scenarios)

    @classmethod
    def from_dicts(cls, data: Sequence[Mapping[str, Any]]) -> GeneratedScenarioCollection:
        """One scenario for each dict."""
        return cls([GeneratedScenario.from_dict(each) for each in data])

    @classmethod
    def from_json(cls, json_str: str) -> GeneratedScenarioCollection:
        """A list of scenarios, or an object with one under `scenarios` or its first key."""
        read = json.loads(json_str)
        if isinstance(read, dict):
            named = cast(dict[str, Any], read)
            read = named["scenarios"] if "scenarios" in named else next(iter(named.values()))
        return cls.from_dicts(cast(list[dict[str, Any]], read))

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each scenario."""
        return [each.to_dict() for each in self.scenarios]

    def to_json(self, indent: int | None = None) -> str:
        """What `from_json` reads."""
        return json.dumps({"scenarios": self.to_dicts()}, indent=indent)

    def __len__(self) -> int:
        return len(self.scenarios)

    def __iter__(self) -> Iterator[GeneratedScenario]:
        return iter(self.scenarios)

    def __getitem__(self, index: int) -> GeneratedScenario:
        return self.scenarios[index]

    def shuffle(self) -> GeneratedScenarioCollection:
        """A new collection in random order."""
        return GeneratedScenarioCollection(random.sample(self.scenarios, len(self.scenarios)))

    def split(self, train_size: int) -> tuple[GeneratedScenarioCollection, GeneratedScenarioCollection]:
        """The first `train_size`, and the others. Raises ValueError where there are fewer."""
        if train_size > len(self.scenarios):
            raise ValueError(f"train_size: there are {len(self.scenarios)} scenarios, {train_size} were asked for")
        first, others = self.scenarios[:train_size], self.scenarios[train_size:]
        return GeneratedScenarioCollection(first), GeneratedScenarioCollection(others)

    def filter_by_difficulty(self, min_difficulty: int = 1, max_difficulty: int = 5) -> GeneratedScenarioCollection:
        """Those between the two, inclusive."""
        kept = [each for each in self.scenarios if min_difficulty <= each.difficulty <= max_difficulty]
        return GeneratedScenarioCollection(kept)

    def get_difficulty_distribution(self) -> Counter[int]:
        """Difficulty -> how many."""
        return Counter(each.difficulty for each in self.scenarios)

    def preview(self, n: int = 5, max_task_length: int = 120) -> None:
        """Print the first `n` tasks."""
        for number, each in enumerate(self.scenarios[:n], 1):
            echo(f"{number}. {each.preview(max_task_length)!r} (difficulty {each.difficulty}/5)")

    def print_difficulty_distribution(self) -> None:
        """Print how many there are of each difficulty."""
        counts = self.get_difficulty_distribution()
        for difficulty in range(1, 6):
            echo(f"{difficulty}/5: {counts[difficulty]:3}  {'█' * min(counts[difficulty], 30)}")

    def get_summary(self) -> dict[str, Any]:
        """Number, difficulties, and averages of difficulty and length of the tasks."""
        total = max(len(self.scenarios), 1)
        return {
            "total_scenarios": len(self.scenarios),
            "difficulty_distribution": dict(self.get_difficulty_distribution()),
            "avg_difficulty": sum(each.difficulty for each in self.scenarios) / total,
            "avg_task_length": sum(len(each.task) for each in self.scenarios) / total,
        }
