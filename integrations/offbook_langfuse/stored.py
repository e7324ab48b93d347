"""What is stored in Langfuse: datasets, whose items have the ids of scenarios, and managed prompts, noted on the rollouts that use them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import quote

from pydantic import ValidationError

from offbook import Scenario, current_trajectory
from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message
from offbook.base.user_values import json_value
from offbook.scenarios.identity import scenario_fields, scenario_id

from .connection import LangfuseConnection, LangfuseRest

EXPECTED: Final = ("expected_output", "expected", "answer", "solution")
"""Fields of a scenario that hold what is expected; the first that it has, unless one is named."""
VALUE: Final = "value"
"""Expected output that is no object is wrapped under this key: a bare "3" would come back as the number 3."""


@dataclass(frozen=True)
class DatasetItem:
    """One item as it is stored."""

    id: str
    dataset_id: str
    input: Json
    expected: Json
    metadata: Mapping[str, Json]


def save_dataset(
    name: str,
    scenarios: Sequence[object],
    *,
    expected: str | None = None,
    description: str | None = None,
    connection: LangfuseConnection | None = None,
) -> int:
    """Write scenarios as items of a dataset, which is made where it is missing; returns how many. The same scenario
    updates its item. `expected`: the field with the expected output."""
    items = [_item_body(name, scenario, expected) for scenario in scenarios]
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        rest.post("/api/public/v2/datasets", {"name": name, "description": description})
        for item in items:
            rest.post("/api/public/dataset-items", item)
    return len(items)


def dataset_scenarios(name: str, *, connection: LangfuseConnection | None = None) -> list[Scenario]:
    """The active items of a dataset as scenarios. An item's object input becomes their fields, any other their `prompt`."""
    return [_scenario(item) for item in dataset_items(connection or LangfuseConnection.from_environment(), name)]


def dataset_items(connection: LangfuseConnection, name: str) -> list[DatasetItem]:
    """The active items of a dataset. Raises ConfigError for one that does not exist."""
    with LangfuseRest(connection) as rest:
        rest.get(f"/api/public/v2/datasets/{quote(name, safe='')}")
        return [_stored(item) for item in rest.by_page("/api/public/dataset-items", {"datasetName": name})
                if item.get("status", "ACTIVE") == "ACTIVE"]  # fmt: skip


def _stored(item: Mapping[str, Json]) -> DatasetItem:
    expected = item.get("expectedOutput")
    if isinstance(expected, Mapping) and set(cast(Mapping[str, Json], expected)) == {VALUE}:
        expected = cast(Mapping[str, Json], expected)[VALUE]
    metadata = item.get("metadata")
    return DatasetItem(
        str(item.get("id", "")),
        str(item.get("datasetId", "")),
        item.get("input"),
        expected,
        cast(Mapping[str, Json], metadata) if isinstance(metadata, Mapping) else {},
    )


def _item_body(dataset: str, scenario: object, expected: str | None) -> dict[str, Json]:
    fields = scenario_fields(scenario) if not isinstance(scenario, str) else {"prompt": scenario}
    fields.pop("id", None)
    names = (expected,) if expected is not None else EXPECTED
    key = next((name for name in names if fields.get(name) is not None), None)
    if expected is not None and key is None:
        raise ConfigError(
            f"save_dataset: expected={expected!r}, but scenario {scenario_id(scenario)!r} has no such field"
        )
    answer: Json = fields.pop(key) if key is not None else None
    bare = answer is not None and not isinstance(answer, dict)
    return {
        "datasetName": dataset,
        "id": scenario_id(scenario),
        "input": {name: value for name, value in fields.items() if value is not None},
        "expectedOutput": {VALUE: answer} if bare else answer,
        "metadata": {"expected_field": key} if key is not None else {},
    }


def _scenario(item: DatasetItem) -> Scenario:
    own = item.input
    fields: dict[str, Json] = (
        dict(cast(Mapping[str, Json], own))
        if isinstance(own, Mapping)
        else {"prompt": own if isinstance(own, str) or own is None else str(own)}
    )
    if item.expected is not None:
        fields[str(item.metadata.get("expected_field") or EXPECTED[0])] = item.expected
    fields.pop("id", None)
    try:
        return Scenario.model_validate({"id": item.id, **json_value(fields, "its input")})
    except (ValidationError, ConfigError, RecursionError) as error:
        raise ConfigError(f"the dataset's item {item.id!r:.100} is not a scenario: {error!s:.300}") from error


_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


@dataclass(frozen=True)
class ManagedPrompt:
    """A version of a prompt: a text, or chat messages."""

    name: str
    version: int
    prompt: str | tuple[Message, ...]
    config: Mapping[str, Json]

    def compile(self, **variables: object) -> str | list[Message]:
        """The prompt with its `{{variables}}` filled in, noted on the rollout that runs here. Raises ConfigError for one
        that is missing."""
        trajectory = current_trajectory()
        if trajectory is not None:
            trajectory.metadata["prompt"] = f"{self.name}@{self.version}"
        if isinstance(self.prompt, str):
            return self._filled(self.prompt, variables)
        return [
            {**message, "content": self._filled(str(message.get("content", "")), variables)} for message in self.prompt
        ]

    def _filled(self, text: str, variables: Mapping[str, object]) -> str:
        missing = sorted(set(_VARIABLE.findall(text)) - set(variables))
        if missing:
            raise ConfigError(f"prompt {self.name!r} version {self.version}: no value for {', '.join(missing)}")
        return _VARIABLE.sub(lambda match: str(variables[match[1]]), text)


def managed_prompt(
    name: str, *, version: int | None = None, label: str | None = None, connection: LangfuseConnection | None = None
) -> ManagedPrompt:
    """A prompt by version, by label, or the one labelled `production`. Raises ConfigError for one that does not exist."""
    if version is not None and label is not None:
        raise ConfigError(f"prompt {name!r}: give a version or a label, not both")
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        answer = rest.get(f"/api/public/v2/prompts/{quote(name, safe='')}", {"version": version, "label": label})
    text: Json = answer.get("prompt")
    number: Json = answer.get("version")
    config: Json = answer.get("config") or {}
    messages = cast(Sequence[Json], text if isinstance(text, list) else ())
    whole = isinstance(text, str) or (isinstance(text, list) and all(isinstance(message, dict) for message in messages))
    if not whole or not isinstance(number, int) or not isinstance(config, dict):
        raise ConfigError(f"Langfuse answered the prompt {name!r} with no prompt: {dict(answer)!r:.300}")
    prompt = text if isinstance(text, str) else tuple(cast(Sequence[Message], messages))
    return ManagedPrompt(str(answer.get("name", name)), number, prompt, cast(Mapping[str, Json], config))
