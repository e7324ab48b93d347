"""The calls of an app on its own models: their time and tokens as the app reports them, their cost, and the budget."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.types import CallStatus, CallTrace, Trajectory
from offbook.llms.ledger import Reservation, SpendingTotals, spending
from offbook.llms.options import LlmOptions, Price
from offbook.llms.prices import UsedTokens, cost_of, price_of
from offbook.llms.provider import load

from .journal import MeasuredCall

PURPOSE = "app"
"""Purpose under which the app's own calls are counted."""
NO_PRICES: Mapping[str, Mapping[str, Any]] = {}


class OwnCalls:
    """Measures and counts rollouts on the app's own models. `prices`: of all of them; None: by litellm's table."""

    def __init__(self, prices: Price | None) -> None:
        self._prices = prices
        self._dearest: float | None = None

    @asynccontextmanager
    async def reserved(self) -> AsyncGenerator[Reservation]:
        """Reserve what the dearest rollout so far has cost; the first one runs alone where there is a budget.

        Raises BudgetExceeded when the budget is spent."""
        expected = float("inf") if self._dearest is None else self._dearest
        async with spending().reserved(expected) as bill:
            yield bill

    async def measured(self, trajectory: Trajectory, bill: Reservation) -> list[MeasuredCall]:
        """The calls of a finished rollout, charged to the budget.

        Raises ConfigError for a call of unknown price under a `max_cost`."""
        table = await asyncio.to_thread(_table) if self._prices is None else NO_PRICES
        calls = [self._measured(call, table) for call in trajectory.outside_calls]
        unpriced = [call for call in calls if call.cost is None]
        cost = sum(call.cost or 0.0 for call in calls)
        bill.charge(cost)
        self._dearest = max(cost, self._dearest or 0.0)
        totals = SpendingTotals(
            questions=len(calls),
            requests=len(calls),
            prompt_tokens=sum(call.prompt_tokens or 0 for call in calls),
            completion_tokens=sum(call.completion_tokens or 0 for call in calls),
            uncounted=sum(call.prompt_tokens is None for call in calls),
            cost=cost,
            unpriced=len(unpriced),
        )
        if calls:
            spending().record(PURPOSE, totals)
        if unpriced and spending().limited:
            model = next(call.model for call in trajectory.outside_calls)
            raise ConfigError(
                f"max_cost needs the cost of the app's own calls, but the price or the tokens of a call to {model!r} "
                "are unknown: write as-is?prompt_price=2&completion_price=8, in USD per million tokens. A stream "
                "reports its tokens with stream_usage=True"
            )
        return calls

    def _measured(self, call: CallTrace, table: Mapping[str, Mapping[str, Any]]) -> MeasuredCall:
        """The call with its cost: none if it failed, unknown if the provider reports no tokens or has no price."""
        measured, cost = MeasuredCall.of(call), None
        price = price_of(LlmOptions(model=call.model, prices=self._prices), table)
        if call.status in (CallStatus.FAILED, CallStatus.CANCELLED):
            cost = 0.0
        elif price is not None and measured.prompt_tokens is not None and measured.completion_tokens is not None:
            cost = cost_of(UsedTokens(measured.prompt_tokens, measured.completion_tokens), price)
        return measured.model_copy(update={"cost": cost})


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """litellm's prices; empty where it is not installed, so that prices are unknown."""
    try:
        return load().model_cost
    except MissingExtraError:
        return NO_PRICES
