"""Runs the rollouts of one candidate, measures them, and stores them in the journal and on the server."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai.types.chat.chat_completion import Choice

from offbook.base import clock
from offbook.base.choices import MARK, mark_of
from offbook.base.errors import ConfigError, MissingExtraError, RolloutError
from offbook.base.redaction import redacted_record
from offbook.base.text import counted
from offbook.base.types import (
    CallStatus,
    CallTrace,
    History,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    as_rollout_exception,
)
from offbook.client.connection.progress import RolloutBar
from offbook.client.model import FixedStepModel, Model, TrainableModel
from offbook.client.rollouts.capture import at_temperature, completions_limited, histories_of, recorded_calls
from offbook.client.rollouts.gather import raise_common_fault
from offbook.client.rollouts.records import make_recordable, rollout_records
from offbook.llms.ledger import Reservation, SpendingTotals, spending
from offbook.llms.options import LlmOptions, Price
from offbook.llms.prices import UsedTokens, cost_of, price_of
from offbook.llms.provider import load
from offbook.scenarios.identity import scenario_id

from .candidates import Candidate
from .gateway import Gateway
from .journal import (
    ComparedRollout,
    Journal,
    MeasuredCall,
    call_totals,
    content_hash,
)
from .options import CompareOptions
from .targets import ComparableTarget, answering_itself

SPLIT = "compare"
"""The split of these rollouts in the server's records."""


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


@dataclass(frozen=True)
class RolloutStage:
    """The options and resources that the rollouts of all candidates share."""

    target: ComparableTarget
    own: Sequence[TrainableModel]
    scenarios: Sequence[object]
    options: CompareOptions
    journal: Journal
    gateway: Gateway
    run: str
    judged: bool
    own_calls: OwnCalls

    async def rows(self, candidate: Candidate) -> list[ComparedRollout]:
        """All rollouts of the candidate, in the order of the scenarios. Rollouts in the journal are not run again.

        Raises an error that every rollout would have, and RolloutError if the app never called the candidate.
        """
        slots = asyncio.Semaphore(self.options.concurrency)
        models = self._models(candidate)
        bar = RolloutBar(candidate.name, len(self.scenarios) * self.options.rollouts, 1)

        async def one(scenario: object, index: int) -> ComparedRollout:
            fingerprint = self._fingerprint(candidate, scenario)
            known = self.journal.rows.get(f"{fingerprint}-{index}")
            if known is not None:
                bar.succeeded([known.trajectory])
                return known
            async with slots:
                row = await self._run(candidate, models, scenario, index, fingerprint)
            self.journal.add(row)
            await self._save(candidate, row)
            bar.succeeded([row.trajectory]) if not row.failed else bar.failed()
            return row

        limits = (at_temperature(self.options.temperature), completions_limited(self.options.max_completion_tokens))
        with limits[0], limits[1], bar:
            tasks = [
                asyncio.create_task(one(scenario, index))
                for scenario in self.scenarios
                for index in range(self.options.rollouts)
            ]
            try:
                rows = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        if not any(row.calls or row.failed for row in rows):
            raise RolloutError(
                f"{candidate.name}: the app made no call to it in {counted(len(rows), 'rollout')}: does select= leave every call out, or "
                "does the app call a model that is not captured?"
            )
        return rows

    def _models(self, candidate: Candidate) -> list[Model[Any]]:
        """The models that answer in place of the app's own, in the same order."""
        if candidate.as_is:
            return []
        if candidate.llm is not None:
            return [self.gateway.model(candidate.name) for _ in self.own or (None,)]
        assert candidate.step is not None
        return [FixedStepModel(model, candidate.step) for model in self.own]

    def run_of(self, candidate: Candidate) -> str:
        """The candidate's run id in the server's records. Lists of runs cut long names, so the candidate comes first."""
        return f"{candidate.record_name}-{self.run}"

    def _fingerprint(self, candidate: Candidate, scenario: object) -> str:
        """Hash of everything that the candidate's rollouts of a scenario depend on."""
        options = self.options
        own = [f"{model.name} {model.base_model}" for model in self.own] if candidate.trained else []
        parts = (candidate.fingerprint, *own, scenario_id(scenario), content_hash(scenario))
        sampled = (str(options.temperature), str(options.max_completion_tokens), str(self.judged))
        return hashlib.sha256("\n".join([*parts, *sampled]).encode()).hexdigest()[:24]

    async def _run(
        self, candidate: Candidate, models: Sequence[Model[Any]], scenario: object, index: int, fingerprint: str
    ) -> ComparedRollout:
        """Run one rollout. Its exception is stored, unless every rollout would have it."""
        own = Trajectory()
        if candidate.as_is:
            async with self.own_calls.reserved() as bill:
                trajectory = await self._ended(candidate, models, scenario, own)
                measured = await self.own_calls.measured(trajectory, bill)
        else:
            trajectory = await self._ended(candidate, models, scenario, own)
            if self.gateway.fault is not None:
                raise self.gateway.fault
            if candidate.llm is not None:
                calls = self.gateway.take_calls(dict.fromkeys((own.id, trajectory.id)))
                measured, trajectory = [MeasuredCall.of(call) for call in calls], unmarked(trajectory, calls)
            else:
                measured = await self._recorded(trajectory)
        name = scenario_id(scenario)
        place = RolloutPlace(
            run=self.run_of(candidate),
            split=SPLIT,
            step=candidate.step,
            scenario=name,
            group=f"{self.run_of(candidate)}/{fingerprint}",
            index=index,
        )
        trajectory = redacted_record(trajectory)
        trajectory.place = trajectory.place.filled(place)
        trajectory.metrics.update(call_totals(measured))
        failure = trajectory.exception
        return ComparedRollout(
            key=f"{fingerprint}-{index}",
            candidate=candidate.name,
            step=candidate.step,
            scenario=name,
            index=index,
            reward=None if failure is not None or trajectory.reward is None else float(trajectory.reward),
            metrics=dict(trajectory.metrics),
            error=None if failure is None else f"{failure.type}: {failure.message}",
            calls=tuple(measured),
            seconds=max((trajectory.ended_at or clock.end_of(trajectory.started_at)) - trajectory.started_at, 0.0),
            trajectory=trajectory,
        )

    async def _ended(
        self, candidate: Candidate, models: Sequence[Model[Any]], scenario: object, own: Trajectory
    ) -> Trajectory:
        """The trajectory of a rollout, which has its exception unless every rollout would have it."""
        timeout, judged = self.options.timeout, self.judged
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                if candidate.as_is:
                    trajectory = await answering_itself(self.target).rollout_as_is(scenario, own, judged=judged)
                else:
                    trajectory = await self.target.rollout_by(models, scenario, own, judged=judged)
            make_recordable(trajectory)
            return trajectory
        except Exception as error:  # noqa: BLE001  # a bad rollout is data, not a crash
            raise_common_fault(error)
            late = isinstance(error, TimeoutError) and limit.expired()
            cause = TimeoutError(f"the rollout took longer than timeout={timeout:g} s") if late else error
            return own.model_copy(update={"reward": None, "exception": as_rollout_exception(cause)}).finish()

    async def _recorded(self, trajectory: Trajectory) -> list[MeasuredCall]:
        """The calls that the servers of the trained models recorded for the trajectory."""
        marks = [mark_of(item) for item in _choices(trajectory)]
        ids = dict.fromkeys([trajectory.id, *(str(mark["trajectory_id"]) for mark in marks if mark is not None)])
        apis = {api.url: api for api in [await model.api() for model in self.own]}
        calls = [
            call for api in apis.values() for trajectory_id in ids for call in await recorded_calls(api, trajectory_id)
        ]
        return [MeasuredCall.of(call) for call in sorted(calls, key=lambda call: call.started_at)]

    async def _save(self, candidate: Candidate, row: ComparedRollout) -> None:
        """Store the rollout on the server at once, so that its records also have an interrupted comparison."""
        if self.own:
            api = await self.own[0].api()
            name = self.own[0].name if candidate.trained else candidate.record_name
            await api.finish(rollout_records([row.trajectory], name, RolloutPlace()))


def unmarked(trajectory: Trajectory, calls: Sequence[CallTrace]) -> Trajectory:
    """The trajectory as that of another endpoint: its choices name no recorded calls, and it has the calls itself.

    If it has no choices, its conversations are built from the calls.
    """
    histories = [trajectory, *trajectory.additional_histories]
    shown: list[History]
    if any(isinstance(item, Choice) for history in histories for item in history.entries()):
        shown = [
            History(
                messages_and_choices=[
                    Choice.model_validate(item.model_dump(exclude={MARK})) if isinstance(item, Choice) else item
                    for item in history.entries()
                ],
                tools=history.tools,
            )
            for history in histories
        ]
    else:
        shown = histories_of([call.without_tokens() for call in calls], marked=False) or [trajectory]
    update: dict[str, object] = {
        "messages_and_choices": shown[0].messages_and_choices,
        "tools": shown[0].tools,
        "additional_histories": shown[1:],
        "captured": False,
        "weights": {},
        "call_rewards": {},
        "unused": [],
        "outside_calls": list(calls),
    }
    return trajectory.model_copy(update=update)


def _choices(trajectory: Trajectory) -> list[Choice]:
    histories = [trajectory, *trajectory.additional_histories]
    return [item for history in histories for item in history.entries() if isinstance(item, Choice)]


def grouped(rows: Sequence[ComparedRollout], scenarios: Sequence[object]) -> list[TrajectoryGroup]:
    """One group of rollouts per scenario, in the scenarios' order."""
    by_scenario: dict[str, list[Trajectory]] = {scenario_id(scenario): [] for scenario in scenarios}
    for row in rows:
        by_scenario[row.scenario].append(row.trajectory)
    return [
        TrajectoryGroup(trajectories, place=RolloutPlace(scenario=name, group=trajectories[0].place.group))
        for name, trajectories in by_scenario.items()
    ]
