"""A task on a server's tools, and how its result is checked."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
