"""A takeover in words that server and command share: its plan, its stages, its state, and a record of every decision."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from .numbers import MOST_USD
from .wire import REWARDING, Score, Wire

SHADOW = 0.0
"""The share of the stage in which the small model answers too, unseen."""
LEAST_SHARE, LEAST_MARGIN = 1e-6, 1e-4
"""Smallest share of threads of a stage, and smallest margin as a share of the scores' range."""
MOST_SECONDS = 86_400.0
Status = Literal["none", "running", "waiting", "taken_over", "left", "stopped"]
"""waiting: a stage is passed, and a person must approve the next one. left: traffic went back, for the last decision's reason."""
Verdict = Literal["started", "passed", "approved", "taken_over", "left", "stopped", "round"]


def share_text(share: float) -> str:
    """A stage's share of threads as text.

    >>> share_text(0.0), share_text(0.25), share_text(0.0005)
    ('shadow', '25 %', '0.0005')
    """
    return "shadow" if share == SHADOW else f"{share:.4g}" if share < 0.001 else f"{100 * share:g} %"


def _from_text(value: object) -> object:
    """The numbers of a text such as "0,0.05,1", as the command line has them."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class TakeoverPlan(Wire):
    """How a small model takes over. Scores and margin have the unit of the app's feedback."""

    model: str | None = Field(
        default=None, description="small model, as NAME or NAME@STEP; None: the server's newest step"
    )
    stages: Annotated[tuple[FiniteFloat, ...], BeforeValidator(_from_text)] = Field(
        default=(SHADOW, 0.01, 0.05, 0.25, 1.0),
        max_length=20,
        description="shares of threads, comma-separated; 0: shadow",
    )
    margin: FiniteFloat = Field(default=0.05, gt=0, description="largest tolerated loss of mean score")
    alpha: FiniteFloat = Field(
        default=0.05, ge=1e-9, lt=0.5, description="largest probability that a worse model passes a stage"
    )
    score: str = Field(default=REWARDING, min_length=1, max_length=60, description="name of the feedback that decides")
    lowest: Score = Field(default=0.0, description="lowest score")
    highest: Score = Field(default=1.0, description="highest score")
    expected: Score = Field(
        default=0.9, description="expected mean score of the paid model, to plan the number of threads"
    )
    threads: int | None = Field(
        default=None, ge=1, le=10**9, description="most scored threads of the small model in a stage; None: planned"
    )
    min_agreement: FiniteFloat = Field(
        default=0.8, gt=0, lt=1, description="lowest agreement with the paid model that passes the shadow stage"
    )
    approve: bool = Field(default=False, description="wait for `offbook takeover approve` before each next stage")
    answer_seconds: FiniteFloat = Field(
        default=30.0,
        gt=0,
        le=MOST_SECONDS,
        description="seconds after which the paid model answers in place of the small one",
    )
    slow_seconds: FiniteFloat = Field(
        default=10.0, gt=0, le=MOST_SECONDS, description="a call that takes more seconds is slow"
    )
    max_slow: FiniteFloat = Field(default=0.05, gt=0, lt=1, description="largest share of slow calls")
    max_errors: FiniteFloat = Field(default=0.05, gt=0, lt=1, description="largest share of failed calls")
    max_unknown: FiniteFloat = Field(
        default=0.2, gt=0, lt=1, description="largest share of calls that are unlike those recorded before"
    )
    max_tool_errors: FiniteFloat = Field(
        default=0.1, gt=0, lt=1, description="largest share of results of the app's tools that report a failure"
    )
    prompt_price: FiniteFloat = Field(
        default=0.0, ge=0, le=MOST_USD, description="USD per million prompt tokens of the small model"
    )
    completion_price: FiniteFloat = Field(
        default=0.0, ge=0, le=MOST_USD, description="USD per million completion tokens of the small model"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        live = [share for share in self.stages if share != SHADOW]
        if self.stages.count(SHADOW) > 1 or (SHADOW in self.stages and self.stages[0] != SHADOW):
            raise ValueError(f"stages: shadow (0) is the first stage or none, not {self.stages}")
        if len(live) < 2 or live[-1] != 1.0 or sorted(set(live)) != live or live[0] < LEAST_SHARE:
            raise ValueError(
                f"stages: rising shares, not below {LEAST_SHARE:g}, that end with one below 1, and 1, such as "
                f"0,0.05,0.25,1, not {self.stages}"
            )
        if not self.lowest < self.highest or self.margin >= self.highest - self.lowest:
            raise ValueError(
                f"lowest {self.lowest:g}, highest {self.highest:g}, margin {self.margin:g}: lowest < highest, and the margin "
                "is smaller than their difference"
            )
        if self.margin < LEAST_MARGIN * (self.highest - self.lowest):
            raise ValueError(
                f"margin {self.margin:g}: at least {LEAST_MARGIN:g} of the difference of highest and lowest, since no traffic "
                "shows less"
            )
        return self

    def scaled(self, score: float) -> float:
        """A score as a number in [0, 1]; beyond lowest and highest, as those."""
        return min(1.0, max(0.0, (score - self.lowest) / (self.highest - self.lowest)))

    def takes(self, score: float) -> bool:
        """Whether a score is one of this plan's: others are no evidence."""
        return self.lowest <= score <= self.highest


class StageNeeds(Wire):
    """The scored threads of the small model that a stage needs: usually, and at most. `traffic`: at most, of all threads."""

    share: FiniteFloat
    usual: int
    most: int
    traffic: int


class Numbers(Wire):
    """What a decision rests on, of the stage so far. Scores are means in the feedback's unit; `lower` and `upper` bound their
    difference (small - paid), or in shadow the agreement. Costs are USD per call, None without a price or calls."""

    tested: int = 0
    reference: int = 0
    score: FiniteFloat | None = None
    reference_score: FiniteFloat | None = None
    lower: FiniteFloat | None = None
    upper: FiniteFloat | None = None
    calls: int = 0
    failed: dict[str, int] = Field(default_factory=dict)  # calls that the paid model answered in its place, by reason
    slow: int = 0
    results: int = 0  # of the app's tools, in the calls that were read
    tool_errors: int = 0  # those that say that the tool failed
    unknown: int = 0  # calls unlike those that were seen, which the paid model answered
    out_of_range: int = 0  # scores beyond the plan's lowest and highest, which are no evidence
    cost: FiniteFloat | None = None
    reference_cost: FiniteFloat | None = None


class Decision(Wire):
    """A decision, with its numbers. `decided_at`: unix seconds. `model`: the small model; empty in old records."""

    decided_at: FiniteFloat
    stage: int
    share: FiniteFloat
    verdict: Verdict
    reason: str
    numbers: Numbers = Numbers()
    model: str = ""


class TakeoverState(Wire):
    """A route's takeover. `stage`: index in the plan's stages. `share`: of the threads that the small model answers now."""

    route: str
    status: Status = "none"
    id: str = ""
    model: str = ""
    plan: TakeoverPlan = TakeoverPlan()
    stage: int = 0
    share: FiniteFloat = 0.0
    needs: tuple[StageNeeds, ...] = ()
    numbers: Numbers = Numbers()
    decisions: tuple[Decision, ...] = ()

    @model_validator(mode="after")
    def _within_its_plan(self) -> Self:
        if self.id and not 0 <= self.stage < len(self.plan.stages) == len(self.needs):
            raise ValueError(f"stage {self.stage} and the needs of {len(self.needs)} stages are not those of the plan")
        return self
