"""Feedback on what was recorded, and the sums over an app's calls: the types that server and client share."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, FiniteFloat, model_validator

from offbook.base.wire import Wire


class RouteState(Wire):
    """An app whose calls pass through to a paid model, and sums over them. Latencies are in seconds, exact to 25 %; `cost` is
    in USD. `uncounted`: calls without token counts, such as streams that do not say them; `unpriced`: with, and no known price."""

    name: str
    upstream: str
    record_share: FiniteFloat = Field(ge=0, le=1)
    calls: int = 0
    failed: int = 0
    cancelled: int = 0
    uncounted: int = 0
    unpriced: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: FiniteFloat = 0.0
    recorded: int = 0
    not_recorded: dict[str, int] = Field(default_factory=dict)  # calls of recorded threads, by reason
    failed_steps: dict[str, int] = Field(default_factory=dict)  # failures of the server's own that no call noticed
    seconds_p50: FiniteFloat | None = None
    seconds_p99: FiniteFloat | None = None


Score = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]
REWARDING = "score"
"""Name of the feedback that becomes the reward of a trajectory that had none."""


class FeedbackRequest(Wire):
    """A score, and a comment, for exactly one call, trajectory or thread. `thread_id`: the app's own name of a thread of
    `route`, by default the server's. `name`: what was scored; REWARDING becomes the reward too."""

    thread_id: str | None = Field(default=None, min_length=1, max_length=1000)
    route: str | None = Field(default=None, min_length=1, max_length=200)
    trajectory_id: str | None = Field(default=None, min_length=1, max_length=200)
    call_id: str | None = Field(default=None, min_length=1, max_length=200)
    score: Score
    comment: str | None = Field(default=None, max_length=10_000)
    name: str = Field(default=REWARDING, pattern=r"^[A-Za-z0-9._-]{1,60}$")

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if sum(name is not None for name in (self.thread_id, self.trajectory_id, self.call_id)) != 1:
            raise ValueError("name one of thread_id, trajectory_id and call_id")
        return self


class FeedbackResult(Wire):
    """The trajectory that has the feedback, with its reward. `changed`: false if it had the same already."""

    trajectory_id: str
    reward: float | None
    changed: bool
