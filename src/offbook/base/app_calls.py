"""What an app that asks its paid model itself tells the server, and asks it: which side answers a call, and what was paid."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from .numbers import MOST_USD
from .takeovers import TakeoverPlan
from .types import UnixSeconds
from .wire import StoredJson, Wire

CALLS_AT_ONCE = 50
"""Calls of one report."""
Thread = Annotated[str, Field(min_length=1, max_length=1000)]
Usd = Annotated[FiniteFloat, Field(ge=0, le=MOST_USD)]


class SideRequest(Wire):
    """A call that the app is about to make: `request` as a body of chat completions, of the app's own name of a thread. `plan`:
    of the takeover that begins if the route has had none."""

    request: dict[str, StoredJson]
    thread_id: Thread | None = None
    plan: TakeoverPlan | None = None


class SideAnswer(Wire):
    """Whether the small model answers the call, within so many seconds; else the app asks its own model."""

    small: bool
    seconds: FiniteFloat


class AppCall(Wire):
    """A call that the app's own model has answered. `answer`: a chat completion, None if it failed. `model`: such as
    openai/gpt-4.1. `prices`: USD per million tokens of the prompt and the completion; None: as the server's table has them."""

    request: dict[str, StoredJson]
    answer: dict[str, StoredJson] | None
    model: str = Field(min_length=1, max_length=200)
    started_at: UnixSeconds
    ended_at: UnixSeconds
    thread_id: Thread | None = None
    prices: tuple[Usd, Usd] | None = None


class AppCalls(Wire):
    """Calls that the app's own models have answered."""

    calls: tuple[AppCall, ...] = Field(max_length=CALLS_AT_ONCE)
