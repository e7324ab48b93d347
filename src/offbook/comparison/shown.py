"""Shows a comparison in trace sinks, with every candidate as its own evaluation run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from offbook.contracts import EvaluationFinished, GroupsFinished, RunStarted
from offbook.tracing.fanout import FanOut
from offbook.tracing.sink_registry import resolve_sinks

from .results import ComparisonReport, Scored
from .rollouts import SPLIT, RolloutStage

logger = logging.getLogger("offbook")

CLOSE_SECONDS = 60.0
"""How long a sink may take for one candidate. The comparison has ended, so nothing else waits."""


async def show_to_sinks(stage: RolloutStage, scored: Sequence[Scored], comparison: ComparisonReport) -> None:
    """Send every candidate to the configured sinks under its own run.

    Sinks read the rollouts from the server. Without a trained model there is no server, which is logged.
    """
    sinks = resolve_sinks(stage.settings.sinks)
    own = stage.target.own_models()
    if not sinks:
        return
    if not own:
        logger.warning("sinks: the app was wrapped without a model, so no server has its rollouts: nothing is shown")
        return
    servers = list({api.url: api for api in [await model.api() for model in own]}.values())
    for item in scored:
        name = own[0].name if item.candidate.trained else item.candidate.record_name  # as the server knows it
        step = item.candidate.step or 0
        groups = tuple(dict.fromkeys(row.trajectory.place.group or "" for row in item.rows))
        metrics = item.as_metrics() | _measured(comparison, item.candidate.name)
        fanout = FanOut(sinks, stage.run_of(item.candidate), servers)
        fanout.publish(RunStarted(fanout.run, name, step, time.time(), comparison.settings))
        fanout.publish(GroupsFinished(fanout.run, SPLIT, step, groups))
        fanout.publish(EvaluationFinished(fanout.run, name, SPLIT, step, time.time(), metrics, groups))
        for line in await asyncio.to_thread(fanout.close, CLOSE_SECONDS):
            logger.warning(line)


def _measured(comparison: ComparisonReport, name: str) -> dict[str, float]:
    result = comparison.of(name)
    values = {"cost": result.cost, "tokens_per_second": result.tokens_per_second}
    if result.latency is not None:
        values |= {"latency_p50": result.latency[0], "latency_p95": result.latency[1]}
    return {key: value for key, value in values.items() if value is not None}
