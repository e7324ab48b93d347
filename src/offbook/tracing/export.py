"""Delivers a run to sinks again from the records: after a sink's outage, or if the client disappeared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from offbook.base.errors import ConfigError, OffbookError
from offbook.base.redaction import error_text
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import RolloutPlace
from offbook.base.wire import ModelRecords, RolloutTrace, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.contracts import (
    CheckpointSaved,
    EvaluationFinished,
    GroupsFinished,
    StepFinished,
    TraceEvent,
    TraceSink,
)

from .fanout import show, show_checkpoint, sink_name
from .rollout_reader import PAGE, StoredRecords, read_run

LOG_ONLY = "exception_rate"
"""Metric that `model.log` adds to those of an evaluation."""
CHUNK = 16
"""Groups per event."""


class ExportError(OffbookError):
    """A sink did not accept all events of an export."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one run: its rollouts in the order in which they were finished, and its models by name."""

    run: str
    rollouts: tuple[RolloutTrace, ...]
    models: tuple[ModelRecords, ...]


async def read_records(source: Api | StoredRecords, run: str) -> RunRecords:
    """Read all records of a run from a server, or from a directory on which none runs.

    Raises ConfigError if there is no rollout of it, ServerError, BackendError.
    """
    if isinstance(source, Api):
        rollouts = await read_run([source], run)
    else:
        query = TrajectoryQuery(run=run, limit=PAGE)
        rollouts = tuple([rollout async for rollout in source.rollouts(query)][::-1])
    if not rollouts:
        where = source.url if isinstance(source, Api) else source.place
        raise ConfigError(f"--run: {where} has no rollout of a run {run!r}; `offbook runs` lists the runs")
    names = {item.record.model for item in rollouts} | {call.model for item in rollouts for call in item.calls}
    models = await _server_models(source, names) if isinstance(source, Api) else await source.models()
    own = sorted((model for model in models if model.name in names), key=lambda model: model.name)
    return RunRecords(run, rollouts, tuple(own))


async def _server_models(api: Api, names: Set[str]) -> list[ModelRecords]:
    return [
        ModelRecords(name=name, checkpoints=tuple(await api.checkpoints(name)), logs=tuple(await api.logs(name)))
        for name in [model.name for model in await api.models()]
        if name in names
    ]


def run_events(records: RunRecords) -> Iterator[TraceEvent]:
    """The events of a run in order of their steps, with the same ids as in the live run.

    Settings, alerts and steps that trained nothing are not in the records.
    """
    keyed: dict[tuple[int, str], list[RolloutTrace]] = {}
    for rollout in records.rollouts:
        keyed.setdefault((_step(rollout), rollout.record.place.split or "train"), []).append(rollout)
    steps = dict(_steps(records))
    for step, split in sorted(keyed, key=lambda key: (key[0], key[1] == "train")):
        for chunk in _by_group(keyed[step, split]):
            groups = tuple(dict.fromkeys(str(trace.record.place.group) for trace in chunk))
            yield GroupsFinished(records.run, split, step, groups, tuple(chunk))
        if split != "train":
            yield from _evaluations(records, step, split, keyed[step, split])
            continue
        yield from steps.pop(step, ())
    for events in steps.values():
        yield from events


def _by_group(rollouts: Sequence[RolloutTrace]) -> Iterator[list[RolloutTrace]]:
    groups: dict[str | None, list[RolloutTrace]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.record.place.group, []).append(rollout)
    ordered = list(groups.values())
    for start in range(0, len(ordered), CHUNK):
        yield [rollout for group in ordered[start : start + CHUNK] for rollout in group]


def _steps(records: RunRecords) -> Iterator[tuple[int, list[TraceEvent]]]:
    """For every checkpoint of the run, the step that its rollouts were sampled with, and its events."""
    trained = [item for item in records.rollouts if item.record.place.split in (None, "train")]
    if not trained:
        return
    began, ended = min(map(_step, trained)), max(map(_step, trained))
    since = min(item.record.started_at for item in trained)
    for number, model in enumerate(records.models):
        own = [item for item in model.checkpoints if began < item.step <= ended + 1 and item.created_at >= since]
        for item in own:
            reward = {"reward": item.metrics["reward/mean"]} if "reward/mean" in item.metrics else {}
            metrics = {**item.metrics, **reward}
            saved = CheckpointSaved(records.run, model.name, item.step, item.path, item.metrics)
            step = StepFinished(records.run, model.name, item.step, item.step - 1, item.created_at, metrics)
            yield item.step - 1 + number * 10**9, [step, saved]  # further models come after the rollouts


def _evaluations(
    records: RunRecords, step: int, split: str, rollouts: Sequence[RolloutTrace]
) -> Iterator[EvaluationFinished]:
    ids = {rollout.record.id for rollout in rollouts}
    groups = tuple(dict.fromkeys(str(rollout.record.place.group) for rollout in rollouts))
    for model in records.models:
        for entry in model.logs:
            if entry.split == split and ids & set(entry.trajectory_ids):
                named = {name.removeprefix(f"{split}/"): value for name, value in entry.metrics.items()}
                metrics = {name: value for name, value in named.items() if name != LOG_ONLY}
                ended_at = max(rollout.record.ended_at for rollout in rollouts)
                yield EvaluationFinished(
                    records.run, model.name, split, step, ended_at, metrics, groups, tuple(rollouts)
                )


def export_run(
    source: Api | StoredRecords,
    run: str,
    sinks: Sequence[TraceSink],
    say: Callable[[str], None] = echo,
) -> None:
    """Deliver the whole run to every sink, from a server's records, or from a directory on which none runs. Events have fixed ids, so those that a sink already has are overwritten.

    Raises ConfigError for wrong credentials or an unknown run, ExportError if a sink did not accept all events.
    """
    for sink in sinks:
        sink.check()
    records = asyncio.run(read_records(source, run))
    failed: list[str] = []
    for sink in sinks:
        faults = _deliver(records, sink, [source] if isinstance(source, Api) else [])
        name = sink_name(sink)
        if faults:
            failed.append(f"{name}: {len(faults)} events were not taken, such as {faults[0]}")
            continue
        say(f"{name}: {counted(len(records.rollouts), 'rollout')} of run {run}")
    if failed:
        raise ExportError("; ".join(failed) + ". The same command again delivers the rest")


def _deliver(records: RunRecords, sink: TraceSink, servers: Sequence[Api]) -> list[str]:
    faults: list[str] = []
    for event in run_events(records):
        try:
            if isinstance(event, CheckpointSaved):
                show_checkpoint(sink, event, servers)
            else:
                show(sink, event)
        except Exception as error:  # noqa: BLE001  # a sink is foreign code; the other events are still shown
            faults.append(f"{event.id}: {error_text(error)}")
    sink.closed()
    return faults


def _step(rollout: RolloutTrace) -> int:
    place: RolloutPlace = rollout.record.place
    return place.step or 0
