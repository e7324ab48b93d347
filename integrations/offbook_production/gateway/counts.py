"""What is counted of an app's calls: numbers of calls, tokens and USD, and how long calls took. No text."""

from __future__ import annotations

import bisect
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from offbook.llms.options import Price
from offbook.llms.prices import UsedTokens, cost_of

EDGES = tuple(0.001 * 1.25**number for number in range(64))
"""Upper edges of the bins of latency in seconds, from 1 ms to 21 min. A quantile is exact to 25 %."""
Count = Annotated[int, Field(ge=0)]


class RouteCounts(BaseModel):
    """Sums over all calls of an app. `failed`: the upstream's status was 400 or more, or it could not be reached.

    `uncounted` calls did not say their tokens; `unpriced` had tokens, and no known price. `not_recorded`: calls of recorded
    threads that could not be recorded, by reason. `failed_steps`: failures of this server's own that no call noticed, by step.
    """

    calls: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    uncounted: Count = 0
    unpriced: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    cost: FiniteFloat = Field(default=0.0, ge=0)
    recorded: Count = 0
    not_recorded: dict[str, Count] = Field(default_factory=dict)
    failed_steps: dict[str, Count] = Field(default_factory=dict)
    seconds: list[Count] = Field(default_factory=lambda: [0] * len(EDGES), min_length=len(EDGES), max_length=len(EDGES))

    def add(self, status: int, seconds: float, *, cancelled: bool) -> None:
        """Count a call."""
        self.calls += 1
        self.cancelled += cancelled
        self.failed += not cancelled and status >= 400
        self.seconds[min(bisect.bisect_left(EDGES, seconds), len(EDGES) - 1)] += 1

    def spend(self, used: UsedTokens, price: Price | None) -> float | None:
        """Add a call's tokens; returns its cost in USD, None if the price is unknown."""
        cost = None if price is None else cost_of(used, price)
        self.prompt_tokens += used.prompt
        self.cached_tokens += used.cached
        self.completion_tokens += used.completion
        self.unpriced += cost is None
        self.cost += cost or 0.0
        return cost

    def skip(self, reason: str) -> None:
        """Count a call of a recorded thread that was not recorded."""
        self.not_recorded[reason] = self.not_recorded.get(reason, 0) + 1

    def quantile(self, share: float) -> float | None:
        """The upper edge in seconds of the bin with this share of calls below; None without calls.

        >>> counts = RouteCounts()
        >>> counts.add(200, 0.0009, cancelled=False)
        >>> counts.quantile(0.5)
        0.001
        """
        left = share * sum(self.seconds)
        for edge, number in zip(EDGES, self.seconds, strict=True):
            left -= number
            if number and left <= 0:
                return edge
        return None


def stored_counts(text: str) -> RouteCounts | None:
    """The counts of a stored text; None for one that does not read back, as of a version that believed every number."""
    try:
        return RouteCounts.model_validate_json(text)
    except ValidationError:
        return None
