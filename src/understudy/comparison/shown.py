"""A comparison in trace sinks: each candidate's rollouts as an evaluation of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from understudy.contracts import EvaluationFinished, GroupsFinished, RunStarted
from understudy.tracing.fanout import FanOut
from understudy.tracing.names import resolve_sinks

from .results import ComparisonReport, Scored
from .rollouts import SPLIT, RolloutStage

log = logging.getLogger("understudy")

CLOSE_SECONDS = 60.0
"""For a sink to take one candidate before it is given the next: the comparison has ended, so nothing else waits."""


async def show_to_sinks(stage: RolloutStage, scored: Sequence[Scored], comparison: ComparisonReport) -> None:
    """Show every candidate to the sinks of the settings, under its own run. They read the rollouts from the server; without
    a trained model there is none, which is logged."""
    sinks = resolve_sinks(stage.settings.sinks)
    own = stage.target.own_models()
    if not sinks:
        return
    if not own:
        log.warning("sinks: the app was wrapped without a model, so no server has its rollouts: nothing is shown")
        return
    servers = list({api.url: api for api in [await model.api() for model in own]}.values())
    for each in scored:
        name = own[0].name if each.candidate.trained else each.candidate.record_name  # as the server knows it
        step = each.candidate.step or 0
        groups = tuple(dict.fromkeys(row.trajectory.place.group or "" for row in each.rows))
        metrics = each.as_metrics() | _measured(comparison, each.candidate.name)
        fanout = FanOut(sinks, stage.run_of(each.candidate), servers)
        fanout.publish(RunStarted(fanout.run, name, step, time.time(), comparison.settings))
        fanout.publish(GroupsFinished(fanout.run, SPLIT, step, groups))
        fanout.publish(EvaluationFinished(fanout.run, name, SPLIT, step, time.time(), metrics, groups))
        for line in await asyncio.to_thread(fanout.close, CLOSE_SECONDS):
            log.warning(line)


def _measured(comparison: ComparisonReport, name: str) -> dict[str, float]:
    found = comparison.of(name)
    values = {"cost": found.cost, "tokens_per_second": found.tokens_per_second}
    if found.latency is not None:
        values |= {"latency_p50": found.latency[0], "latency_p95": found.latency[1]}
    return {key: value for key, value in values.items() if value is not None}
