"""What a policy did in one rollout, as rewards see it: nothing in here was written by a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Arguments = dict[str, object]


class EpisodeEnd(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # a message without a tool call
    TURN_LIMIT = "turn_limit"  # it still called tools at its last turn
    CONTEXT_FULL = "context_full"  # what it read and wrote fills the model's context


@dataclass(frozen=True)
class MadeCall:
    """One tool call of the policy. `arguments` is None where they are no JSON object or the tool was not offered, so that
    nothing was called. `failed`: the tool reported an error, which is counted and never scored."""

    tool: str
    arguments: Arguments | None = field(hash=False)
    turn: int = 0
    failed: bool = False


@dataclass(frozen=True)
class ToolEpisode:
    """The calls in the order in which they were written, and the final answer."""

    calls: tuple[MadeCall, ...] = ()
    answer: str = ""
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    turns: int = 0
