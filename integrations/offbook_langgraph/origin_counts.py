"""Counts the calls of rollouts by origin in the app and by the model that answered."""

from __future__ import annotations

import threading
from collections import Counter

from offbook.base.types import CallOrigin

OWN_MODEL = "the app's own model"
"""Target of a call that no selection matches."""
EXCLUDED = "the app's own model, by exclude="
"""Target of a call that `exclude=` names."""
SHOWN = 20
"""The most distinct origins that a message lists."""


class OriginCounts:
    """Counts calls by target and origin. Thread-safe: an app calls its models from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, target: str, origin: CallOrigin) -> None:
        """Count a call that goes to `target`: a model's name, OWN_MODEL or EXCLUDED."""
        with self._lock:
            self._counts[target, described(origin)] += 1

    def merge(self, other: OriginCounts) -> None:
        """Add the counts of `other`."""
        with other._lock:
            counts = Counter(other._counts)
        with self._lock:
            self._counts += counts

    def to(self, target: str) -> int:
        """Number of calls that went to `target`."""
        with self._lock:
            return sum(count for (name, _), count in self._counts.items() if name == target)

    @property
    def total(self) -> int:
        """Number of all calls."""
        with self._lock:
            return self._counts.total()

    def lines(self, target: str | None = None) -> str:
        """Distinct origins with their counts, one per line, the most frequent first. `target` limits them to its calls."""
        with self._lock:
            counts = self._counts.most_common()
        lines = [
            f"  {count} x {origin}" + (f" -> {name}" if target is None else "")
            for (name, origin), count in counts
            if target in (None, name)
        ]
        more = [f"  and {len(lines) - SHOWN} more origins"] if len(lines) > SHOWN else []
        return "\n".join([*lines[:SHOWN], *more])


def described(origin: CallOrigin) -> str:
    """Describe an origin by a selection's keys: `agent 'planner', node 'model', model 'gpt-4.1', kind 'ChatOpenAI'`."""
    parts = {"agent": origin.agent, "node": origin.node, "model": origin.model, "kind": origin.kind}
    known = [f"{name} {value!r}" for name, value in parts.items() if value is not None]
    return ", ".join([*known, *(f"tag {tag!r}" for tag in origin.tags)]) or "nothing known of it"
