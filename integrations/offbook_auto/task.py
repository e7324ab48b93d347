"""The task: what is trained for, as people read and edit it in task.yaml."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field, field_validator

from offbook.base.config import Options
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.json_files import DEEPEST, read_text
from offbook.base.types import Json, Tool
from offbook.rewards.reward_parts import answer_fault, schema_validator
from offbook.scenarios.file_rows import row_of

try:
    import jsonschema
    import yaml
except ImportError:  # packages of the extra `judge`; `require_packages` reports them
    jsonschema = yaml = None

_yaml: Any = yaml

DESCRIBED = 80
"""Characters of a description in messages."""


class Example(Options):
    """An input that a user gave, and the answer that is wanted, if it is known."""

    input: str = Field(min_length=1)
    output: str | None = None


class Task(Options):
    """What is trained for. `inputs` says what an input is; `dimensions` how inputs vary: name -> values."""

    description: str = Field(min_length=1, description="what the model is to do")
    inputs: str = Field(default="", description="what an input looks like, and who writes it")
    dimensions: dict[str, list[str]] = Field(default_factory=dict[str, list[str]])
    examples: list[Example] = Field(default_factory=list[Example])
    answer_schema: dict[str, Json] | None = Field(default=None, description="JSON schema of the answer")
    tools: list[Tool] = Field(default_factory=list[Tool], description="function tools, in OpenAI's format")

    @field_validator("dimensions")
    @classmethod
    def _varied(cls, dimensions: dict[str, list[str]]) -> dict[str, list[str]]:
        for name, values in dimensions.items():
            if len(set(values)) < 2 or not all(value.strip() for value in values):
                raise ValueError(f"dimension {name!r}: at least two different values are needed, got {values!r}")
        return dimensions

    @field_validator("answer_schema")
    @classmethod
    def _valid_schema(cls, schema: dict[str, Json] | None) -> dict[str, Json] | None:
        if schema is not None:
            schema_validator(schema, "no JSON schema")
        return schema

    @field_validator("tools")
    @classmethod
    def _named(cls, tools: list[Tool]) -> list[Tool]:
        for number, tool in enumerate(tools):
            if not tool_name(tool):
                raise ValueError(f"tools[{number}]: no function with a name in OpenAI's format, got {tool!r:.200}")
        return tools

    def faults(self, answer: str) -> str:
        """Why an answer does not fit `answer_schema`; "" if it fits, or if there is none."""
        if self.answer_schema is None:
            return ""
        return answer_fault(answer, schema_validator(self.answer_schema, "answer_schema"))

    def brief(self) -> dict[str, Json]:
        """What a writer or judge is told of the task: the fields that are set."""
        return {name: value for name, value in self.model_dump().items() if value}


def tool_name(tool: Mapping[str, Any]) -> str:
    """The function's name of a tool in OpenAI's format; "" for another value."""
    function: Json = tool.get("function") if tool.get("type") == "function" else None
    return str(function.get("name") or "") if isinstance(function, dict) else ""  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]


def require_packages() -> None:
    """Raise MissingExtraError if PyYAML or jsonschema are not installed."""
    if _yaml is None or jsonschema is None:
        raise MissingExtraError("PyYAML or jsonschema", "judge")


def _check_structure(text: str) -> None:
    """Raise ValueError for aliases, which may stand for any number of values, and for deep nesting, which PyYAML reads in
    quadratic time."""
    depth = 0
    for event in _yaml.parse(text, Loader=_yaml.SafeLoader):
        depth += isinstance(event, _yaml.CollectionStartEvent) - isinstance(event, _yaml.CollectionEndEvent)
        if isinstance(event, _yaml.AliasEvent) or depth > DEEPEST:
            raise ValueError(f"aliases and more than {DEEPEST} levels are not supported")


def read_task(file: Path) -> Task:
    """Read task.yaml. Raises ConfigError, which names the line or the field."""
    require_packages()
    text = read_text(file)
    try:
        _check_structure(text)
        loaded: object = _yaml.safe_load(text)
        json.dumps(loaded, default=str)
    except Exception as error:  # PyYAML's constructors of numbers, dates and truth values raise what their parsers do
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: fields such as `description: ...` are needed, got {loaded!r:.100}")
    named = {str(name): value for name, value in cast(dict[object, Any], loaded).items()}
    row = row_of(1, named, "field")
    if row.values is None:
        raise ConfigError(f"{file}: {row.fault}")
    try:
        return Task.parse(**row.values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def write_task(task: Task, file: Path) -> None:
    """Write task.yaml."""
    require_packages()
    text: str = _yaml.safe_dump(task.model_dump(), sort_keys=False, allow_unicode=True, width=120)
    write_whole(file, text)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there as a whole or not at all. Raises ConfigError."""
    beside = file.with_name(f"{file.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def as_examples(values: Sequence[object]) -> list[Example]:
    """Examples from texts and mappings with `input` and `output`. Raises ConfigError."""
    examples: list[Example] = []
    for number, value in enumerate(values):
        named = {"input": value} if isinstance(value, str) else value
        if not isinstance(named, Mapping):
            raise ConfigError(
                f"examples[{number}]: a text, or a mapping with input and output is needed, got {value!r:.100}"
            )
        fields = cast(Mapping[str, Json], named)
        output = fields.get("output")
        text = output if output is None or isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        examples.append(Example.parse(input=fields.get("input"), output=text))
    return examples
