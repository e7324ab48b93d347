"""The options of `offbook serve` for an app on a paid model."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from offbook.base.config import Name, Options

LONGEST_ROUTE = 55
"""Characters of a route's name: it is part of the records' keys, which have 64."""


def _short_enough(route: str) -> str:
    if len(route) > LONGEST_ROUTE:
        raise ValueError(f"a route's name has at most {LONGEST_ROUTE} characters, this one has {len(route)}")
    return route


RouteName = Annotated[Name, AfterValidator(_short_enough)]
"""The name of an app's calls to a paid model."""


class ProductionOptions(Options):
    """The app's paid model, and what is recorded of its calls."""

    upstream: str | None = Field(
        default=None,
        min_length=1,
        description="paid model that answers the calls of an app below /r/ROUTE, such as openai/gpt-4.1",
    )
    route: RouteName = Field(default="app", description="name of that app's calls")
    record_share: float = Field(
        default=0.0, ge=0, le=1, description="share of the app's threads whose calls are recorded; 0: only counts"
    )
    record_days: float = Field(default=30.0, gt=0, description="days to keep recorded threads of the app")
    record_mb: float = Field(
        default=1024.0, gt=0, description="most megabytes of recorded threads; the oldest are deleted first"
    )
    keep_personal: bool = Field(
        default=False, description="record e-mail addresses, phone, card and account numbers unmasked"
    )
