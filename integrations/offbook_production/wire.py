"""What the wing's routes take and answer: takeovers, feedback, the audit and removal."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from offbook.base.wire import Wire

Score = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]
REWARDING = "score"
"""Name of the feedback that becomes the reward of a trajectory that had none."""
MIN_MARGIN = 1e-4
"""Smallest margin as a share of the scores' range: no traffic shows less."""
MIN_THREADS = 20
"""Fewest scored threads of a side: with less, the interval is no approximation."""
Status = Literal["none", "running", "taken_over", "left", "stopped"]
"""left: traffic went back, for the last decision's reason."""
Verdict = Literal["started", "taken_over", "left", "stopped"]


class TakeoverRule(Wire):
    """When a small model takes over. Scores and margin have the unit of the app's feedback."""

    model: str | None = Field(
        default=None, description="small model, as NAME or NAME@STEP; None: the server's newest step"
    )
    share: FiniteFloat = Field(
        default=0.1, ge=0.001, le=0.999, description="share of threads that the small model answers until the decision"
    )
    threads: int = Field(
        default=100, ge=MIN_THREADS, le=10**6, description="scored threads of each side that the decision needs"
    )
    margin: FiniteFloat = Field(default=0.1, gt=0, description="largest tolerated loss of mean score")
    score: str = Field(default=REWARDING, min_length=1, max_length=60, description="name of the feedback that decides")
    lowest: Score = Field(default=0.0, description="lowest score")
    highest: Score = Field(default=1.0, description="highest score")
    answer_seconds: FiniteFloat = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="seconds after which the paid model answers in place of the small one",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        width = self.highest - self.lowest
        if not MIN_MARGIN * width <= self.margin < width:
            raise ValueError(
                f"lowest {self.lowest:g}, highest {self.highest:g}, margin {self.margin:g}: lowest < highest, and the margin is "
                f"smaller than their difference, and at least {MIN_MARGIN:g} of it"
            )
        return self

    def scaled(self, score: float) -> float:
        """A score between lowest and highest as a number in [0, 1]."""
        return (score - self.lowest) / (self.highest - self.lowest)


class Numbers(Wire):
    """What a decision rests on. `small` and `paid`: scored threads. Scores are means in the feedback's unit; `lower` and `upper`
    are the 95 % interval of their difference (small - paid). `failed`: calls that the paid model answered in the small one's place,
    by reason."""

    small: int = 0
    paid: int = 0
    small_score: FiniteFloat | None = None
    paid_score: FiniteFloat | None = None
    lower: FiniteFloat | None = None
    upper: FiniteFloat | None = None
    calls: int = 0
    failed: dict[str, int] = Field(default_factory=dict)


class Decision(Wire):
    """A decision, with its numbers. `decided_at`: unix seconds."""

    decided_at: FiniteFloat
    verdict: Verdict
    reason: str
    model: str
    numbers: Numbers = Numbers()


class TakeoverState(Wire):
    """A route's takeover. `model`: the small model with its step."""

    route: str
    status: Status = "none"
    id: str = ""
    model: str = ""
    rule: TakeoverRule = TakeoverRule()
    numbers: Numbers = Numbers()
    decisions: tuple[Decision, ...] = ()

    @property
    def active(self) -> bool:
        """Whether calls may go to the small model."""
        return self.status in ("running", "taken_over")

    @property
    def share(self) -> float:
        """The share of new threads that the small model answers."""
        return {"running": self.rule.share, "taken_over": 1.0}.get(self.status, 0.0)


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


MAX_AUDITED = 10_000
"""Most trajectories and threads of one request."""
Id = Annotated[str, Field(min_length=1, max_length=200)]
ThreadId = Annotated[str, Field(min_length=1, max_length=1000)]


class AuditRequest(Wire):
    """Trajectories by their ids, or by the app's own names of threads of `route`, by default the server's."""

    trajectory_ids: tuple[Id, ...] = Field(default=(), max_length=MAX_AUDITED)
    thread_ids: tuple[ThreadId, ...] = Field(default=(), max_length=MAX_AUDITED)
    route: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not (self.trajectory_ids or self.thread_ids):
            raise ValueError("name trajectory_ids or thread_ids")
        return self


class TrajectoryAudit(Wire):
    """What a trajectory trained. `derived`: trajectories that were made from it: runs of a scenario that has its id, and examples
    with its conversation. `trained`: the steps whose train requests had it or one of these. `seen_since`: by model, the first
    step that goes on from one of them; all later ones do too."""

    id: str
    recorded: bool
    derived: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    seen_since: dict[str, int] = Field(default_factory=dict)


class Removal(Wire):
    """What a removal deleted, and what its trajectories had trained. `erased`: the file of the records holds no rest of it, either;
    otherwise a reader or a full disk was in the way."""

    trajectories: tuple[TrajectoryAudit, ...]
    records: int
    calls: int
    files: int
    erased: bool
