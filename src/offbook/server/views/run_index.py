"""Indexes train requests and logged evaluations by the run of their rollouts. Final train requests are parsed once."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
from pydantic import ValidationError
from sqlalchemy import Connection, Row

from offbook.base.types import Json
from offbook.base.wire import LogRequest, TrainStatus
from offbook.server.records import overview

logger = logging.getLogger(__name__)


CROSS_ENTROPY = "cross_entropy"
"""The loss of a supervised update, and the metric of its held-out examples."""
FINAL = frozenset({"done", "failed", "interrupted"})
"""States that change only if the request is sent again."""


@dataclass(frozen=True)
class TrainUpdate:
    """A train request with its result."""

    id: str
    model: str
    state: str
    created_at: float  # unix seconds
    run: str | None
    step: int | None  # policy step of its first rollout
    result_step: int | None  # step of the model afterwards
    applied: bool
    why: str  # why nothing was applied, or the error
    no_signal: str | None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    warnings: tuple[str, ...] = ()
    positions: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Trajectory id -> (number of its group in the request, index in the group)."""
    config: dict[str, Json] = field(default_factory=dict[str, Json])
    evaluates: bool = False  # it measures the loss of its trajectories, and changes nothing

    @property
    def imitates(self) -> bool:
        """Whether its loss is cross-entropy: no rollout is compared with its group."""
        return self.config.get("loss") == CROSS_ENTROPY

    @property
    def min_reward(self) -> float | None:
        """The reward from which it imitates rollouts; None: it does not choose by rewards."""
        least = self.config.get("min_reward")
        return float(least) if isinstance(least, int | float) else None

    @property
    def supervised(self) -> bool:
        """Whether it imitates examples that were chosen before, whatever their rewards are."""
        return self.imitates and self.min_reward is None

    @property
    def cross_entropy(self) -> float | None:
        """Of an update that imitates: the mean over its trained tokens before the update, in nats."""
        return self.metrics.get(f"loss/{CROSS_ENTROPY}")

    @property
    def reward(self) -> float | None:
        """The mean reward of its rollouts; None for a supervised update, whose examples are chosen."""
        return None if self.supervised else self.metrics.get("reward/mean")


@dataclass(frozen=True)
class LoggedEvaluation:
    """Metrics that were logged for a model, such as `{split}/reward` of an evaluation."""

    model: str
    run: str | None
    split: str
    step: int | None
    created_at: float
    metrics: dict[str, float]
    rollouts: int

    def value(self, name: str) -> float | None:
        """A metric by its name without the split; None if it was not logged."""
        return self.metrics.get(f"{self.split}/{name}")


def saved_by_tree(update: TrainUpdate) -> float | None:
    """The share of tokens that the token tree did not have to compute, compared with one row per call."""
    computed, plain = (update.metrics.get(f"tokens/{name}") for name in ("computed", "plain_rows"))
    return None if computed is None or not plain else 1 - computed / plain


def held_out_losses(entries: Iterable[LoggedEvaluation]) -> list[LoggedEvaluation]:
    """The evaluations that measured the cross-entropy of held-out examples."""
    return [entry for entry in entries if measure(entry) == CROSS_ENTROPY]


def evaluations_by_split(entries: Iterable[LoggedEvaluation]) -> dict[str, list[LoggedEvaluation]]:
    """The evaluations with a step and a score, by split, sorted by step. Of a model's evaluations of one step, the newest
    counts: a run that continues after a kill evaluates its first step again."""
    by_split: dict[str, dict[tuple[str, int], LoggedEvaluation]] = {}
    for entry in entries:
        if entry.step is not None and score(entry) is not None:
            by_split.setdefault(entry.split, {})[entry.model, entry.step] = entry
    return {split: sorted(kept.values(), key=lambda entry: entry.step or 0) for split, kept in by_split.items()}


def score(entry: LoggedEvaluation) -> float | None:
    """The success rate of an evaluation if it has one, otherwise its mean reward, or the cross-entropy that it measured."""
    return entry.value(measure(entry))


def measure(entry: LoggedEvaluation) -> str:
    """What `score` is of: `success`, `reward` or `cross_entropy`."""
    return next((name for name in ("success", "reward", CROSS_ENTROPY) if entry.value(name) is not None), "reward")


class UpdateIndex:
    """All train requests of the records, by run. Can be used from several threads."""

    def __init__(self) -> None:
        self._known: dict[str, TrainUpdate] = {}
        self._by_run: dict[str | None, tuple[TrainUpdate, ...]] = {}
        self._lock = threading.Lock()

    def of_run(self, run: str | None) -> tuple[TrainUpdate, ...]:
        """The requests of a run, oldest first, as of the last `refresh`."""
        return self._by_run.get(run, ())

    def refresh(self, connection: Connection) -> None:
        """Read new requests, and those that are not final or changed their state."""
        with self._lock:
            states = overview.train_states(connection)
            wanted = [
                id
                for id, state in states
                if state not in FINAL or id not in self._known or self._known[id].state != state
            ]
            if not wanted and len(states) == len(self._known):
                return
            self._known |= _parsed(connection, overview.train_rows(connection, wanted))
            by_run: dict[str | None, list[TrainUpdate]] = defaultdict(list)
            for id, _ in states:
                by_run[self._known[id].run].append(self._known[id])
            self._known = {id: self._known[id] for id, _ in states}
            self._by_run = {run: tuple(updates) for run, updates in by_run.items()}


class EvaluationIndex:
    """All log entries of the records, by run. Can be used from several threads."""

    def __init__(self) -> None:
        self._newest = 0
        self._by_run: dict[str | None, tuple[LoggedEvaluation, ...]] = {}
        self._lock = threading.Lock()

    def of_run(self, run: str | None) -> tuple[LoggedEvaluation, ...]:
        """The entries of a run, oldest first, as of the last `refresh`."""
        return self._by_run.get(run, ())

    def refresh(self, connection: Connection) -> None:
        """Read new entries."""
        with self._lock:
            rows = overview.log_rows(connection, self._newest)
            if not rows:
                return
            entries = [(row, LogRequest.model_validate_json(row.body)) for row in rows]
            firsts = [entry.trajectory_ids[0] for _, entry in entries if entry.trajectory_ids]
            rollouts = overview.rollouts_by_id(connection, firsts)
            for row, entry in entries:
                rollout = rollouts.get(entry.trajectory_ids[0]) if entry.trajectory_ids else None
                run = rollout.run if rollout is not None else None
                evaluation = LoggedEvaluation(
                    row.model, run, entry.split, entry.step, row.created_at, entry.metrics, len(entry.trajectory_ids)
                )
                self._by_run[run] = (*self._by_run.get(run, ()), evaluation)
            self._newest = rows[-1].id


def _parsed(connection: Connection, rows: Iterable[Row[Json]]) -> dict[str, TrainUpdate]:
    requests = [(row, orjson.loads(row.request or "{}")) for row in rows]
    firsts = [ids[0] for _, request in requests if (ids := _first_group(request))]
    rollouts = overview.rollouts_by_id(connection, firsts)
    updates: dict[str, TrainUpdate] = {}
    for row, request in requests:
        rollout = next((rollouts[id] for id in _first_group(request)[:1] if id in rollouts), None)
        status = _status(row)
        result = status.result
        updates[row.id] = TrainUpdate(
            id=row.id,
            model=row.model,
            state=row.state,
            created_at=row.created_at,
            run=rollout.run if rollout is not None else None,
            step=rollout.step if rollout is not None else None,
            result_step=result.step if result is not None else None,
            applied=result.applied if result is not None else False,
            why=(result.why if result is not None else status.error) or "",
            no_signal=result.no_signal if result is not None else None,
            metrics=result.metrics if result is not None else {},
            warnings=result.warnings if result is not None else (),
            positions=_positions(request),
            config=request.get("config") or {},
            evaluates=bool(request.get("evaluate")),
        )
    return updates


def _status(row: Row[Json]) -> TrainStatus:
    try:
        return TrainStatus.model_validate_json(row.status)
    except ValidationError:
        logger.warning("The stored status of train request %s is invalid; it counts as failed", row.id)
        return TrainStatus(id=row.id, model=row.model, state="failed", error="its stored status is invalid")


def _first_group(request: dict[str, Json]) -> list[str]:
    groups: list[dict[str, Json]] = request.get("groups") or []
    return groups[0]["trajectory_ids"] if groups else []


def _positions(request: dict[str, Json]) -> dict[str, tuple[int, int]]:
    return {
        trajectory_id: (number, index)
        for number, group in enumerate(request.get("groups") or [])
        for index, trajectory_id in enumerate(group["trajectory_ids"])
    }
