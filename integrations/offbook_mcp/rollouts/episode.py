"""The actions of a policy in one rollout, as rewards see them. Contains no text from a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Arguments = dict[str, object]


class EpisodeEnd(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # a message without a tool call
    TURN_LIMIT = "turn_limit"  # it still called tools at its last turn
    CONTEXT_FULL = "context_full"  # the conversation fills the model's context


@dataclass(frozen=True)
class MadeCall:
    """One tool call of the policy.

    `arguments` is None if they were not a JSON object or the tool was not offered, so that nothing was called. `failed`
    means that the tool reported an error, which is counted, and scored only for arguments in a language such as SQL. `returned`
    is a hash of the result of a call with such arguments.
    """

    tool: str
    arguments: Arguments | None = field(hash=False)
    turn: int = 0
    failed: bool = False
    returned: str = ""


@dataclass(frozen=True)
class ToolEpisode:
    """The tool calls in the order in which the model wrote them, and the final answer."""

    calls: tuple[MadeCall, ...] = ()
    answer: str = ""
    end: EpisodeEnd = EpisodeEnd.ANSWERED
    turns: int = 0
    cut_off: bool = False  # the answer ended at the limit of tokens
