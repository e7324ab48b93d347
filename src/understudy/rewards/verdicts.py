"""The schema of a judge's answer, and its validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import BaseModel, Field


class Score(BaseModel):
    """The score of one attempt."""

    id: str = Field(description="the attempt's id, exactly as written")
    explanation: str = Field(description="why, in one or two sentences")
    score: float = Field(description="from 0 (worst) to 1 (best)")


class Verdict(BaseModel):
    """One entry for each attempt."""

    scores: list[Score]


class ReasonedVerdict(BaseModel):
    """A comparison of the attempts, then one entry for each."""

    reasoning: str = Field(description="the comparison, step by step")
    scores: list[Score]


def complete(ids: Sequence[str]) -> Callable[[Verdict | ReasonedVerdict], None]:
    """A validator of answers: every id of `ids` exactly once, no other id, every score from 0 to 1. The validator
    raises ValueError with all faults, in words for the judge."""

    def check(verdict: Verdict | ReasonedVerdict) -> None:
        counts = Counter(score.id for score in verdict.scores)
        faults = [f"no entry for {name!r}" for name in ids if name not in counts]
        faults += [f"{counts[name]} entries for {name!r}" for name in ids if counts[name] > 1]
        faults += [f"there is no attempt {name!r:.60}" for name in counts if name not in ids]
        faults += [
            f"the score of {score.id!r:.60} is {score.score}" for score in verdict.scores if not 0 <= score.score <= 1
        ]
        if faults:
            raise ValueError(
                f"{'; '.join(faults)}. Needed is one entry for each of {', '.join(ids)}, each with a score from 0 to 1"
            )

    return check
