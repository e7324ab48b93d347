"""Warnings of calls that may be a judge's: a policy that judges itself is rewarded for what it likes."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offbook.base.types import CallOrigin

from .call_sites import UNKNOWN_LINE
from .origins import described

logger = logging.getLogger("offbook")


@dataclass(frozen=True)
class CapturedCall:
    """A call that the trained model answers without a `select=`, and the line that made it."""

    origin: CallOrigin
    line: str | None

    @property
    def model(self) -> str | None:
        """What the app calls its model."""
        return self.origin.model or self.origin.kind


def unlike_the_others(calls: Sequence[CapturedCall]) -> list[str]:
    """Describes the calls that may be a judge's: outside every node beside calls inside one, or of another model than most."""
    inside = [call for call in calls if call.origin.node is not None]
    usual = Counter(call.model for call in inside or calls).most_common(1)
    described_calls: list[str] = []
    for call in calls:
        alone = bool(inside) and call.origin.node is None
        if alone or call.model != usual[0][0]:
            place = "outside every graph node, " if alone else ""
            described_calls.append(f"{place}{described(call.origin)}, made at {call.line or UNKNOWN_LINE}")
    return described_calls


def warn_unlike(calls: Sequence[CapturedCall]) -> None:
    """Warn of calls of a rollout that may be a judge's, once a process for equal ones."""
    for what, count in Counter(unlike_the_others(calls)).items():
        _warn(what, count)


@functools.cache
def warn_judge(package: str) -> None:
    """Log, once a package, that its calls are not the policy's."""
    logger.warning("calls of %s are a judge's: they stay on the app's own models, and are not captured", package)


_warned: set[str] = set()


def _warn(what: str, count: int) -> None:
    if what not in _warned:
        _warned.add(what)
        logger.warning(
            "the trained model answers %d call%s unlike the app's others in this rollout: %s. If it is a judge's or a simulated "
            "user's, the policy would judge itself: put the call under `with offbook.outside():`, or name it in exclude=, and "
            "its own model answers. If it is the app's, select= says so",
            count,
            "" if count == 1 else "s",
            what,
        )
