"""A takeover in words that server and command share: its rule, its state, and a record of every decision."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from offbook.base.wire import Wire

from .feedback import REWARDING, Score

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
    by reason. `out_of_range`: scores beyond the rule's lowest and highest, which are no evidence."""

    small: int = 0
    paid: int = 0
    small_score: FiniteFloat | None = None
    paid_score: FiniteFloat | None = None
    lower: FiniteFloat | None = None
    upper: FiniteFloat | None = None
    calls: int = 0
    failed: dict[str, int] = Field(default_factory=dict)
    out_of_range: int = 0


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


class ThreadSide(Wire):
    """Who answers a thread's calls: a model of the server, within so many seconds; else, and with `model=None`, the app's own."""

    model: str | None
    seconds: FiniteFloat
