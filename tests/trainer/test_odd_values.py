"""Odd values that user code hands to a record: made plain, or the failure of their own rollout, never of the run."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime

import numpy as np

from offbook import TrainableModel, Trainer, Trajectory
from offbook.base.wire import TrajectoryQuery
from offbook.scenarios.identity import scenario_id
from tests.trainer.test_trainer import SCENARIOS, SMALL, quiet, rollout

HALF = "\ud800"
"""A lone surrogate: UTF-8 cannot encode it. Python has them in file names and output that it could not decode."""


class Wordless(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise AttributeError("no text")


async def test_a_run_goes_on_and_trains_whatever_single_rollouts_hand_to_their_records(model: TrainableModel) -> None:
    turns = itertools.count()

    async def odd(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        turn = next(turns)
        trajectory = await rollout(model, scenario)
        trajectory.reward = float(turn)
        if turn == 0:
            raise ValueError(f"cannot read {HALF}.txt")
        if turn == 1:
            trajectory.log({"file": HALF})
            trajectory.logs.append({"not": "text"})  # type: ignore[arg-type]
        if turn == 2:
            when = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
            trajectory.metadata |= {"when": when, HALF: [HALF, (np.int64(3), np.float32(0.5))]}
        if turn == 3:
            trajectory.metadata["client"] = object()
        if turn == 4:
            trajectory.unused.append({"call": 1})  # type: ignore[arg-type]
        if turn == 5:
            raise Wordless
        return trajectory

    report = await Trainer(model, odd, SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)
    assert (report.step, report.iterations[0].failed) == (1, 4)
    page = await (await model.api()).trajectories(TrajectoryQuery(model=model.name))
    by_reward = {record.reward: record for record in page.trajectories if record.reward is not None}
    first = {reward for reward in by_reward if reward < 8}  # equal answers teach nothing: another iteration may follow
    assert first == {1.0, 2.0, 6.0, 7.0}
    assert by_reward[1.0].logs == ("{'file': '\\ud800'}", "{'not': 'text'}")
    assert by_reward[2.0].metadata == {"when": "2026-01-02T03:04:00+00:00", "?": ["?", [3, 0.5]]}
    failures = sorted(record.exception.message for record in page.trajectories if record.exception is not None)
    assert failures[0] == "cannot read ?.txt"
    assert failures[1].endswith("Wordless: <exception str() failed>")
    assert failures[3].startswith(
        "the rollout returned what cannot be recorded: the trajectory: metadata['client'] is not JSON"
    )
    assert failures[2].startswith("the rollout returned what cannot be recorded: the trajectory: 1 validation error")


def test_an_odd_scenario_has_an_id() -> None:
    assert re.fullmatch(r"[0-9a-f]{10}", scenario_id(HALF))
