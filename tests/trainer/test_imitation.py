"""Steps with `min_reward` imitate their good rollouts, and good ones of earlier steps again."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import httpx
import pytest

from offbook import TrainableModel, TrainConfig, Trainer, Trajectory
from offbook.base.errors import ConfigError, ServerError
from offbook.base.wire import GroupRecord, TrainRequest, TrajectoryQuery
from offbook.client.connection.train_stream import train
from offbook.trainer.imitation import ScoredRollout, draw
from offbook.trainer.report import Stopped
from offbook_production.wire import AuditRequest, TrajectoryAudit
from tests.trainer.test_trainer import SCENARIOS, quiet, rollout

GOOD = TrainConfig(learning_rate=1e-3, loss="cross_entropy", min_reward=1.0, minibatches=2)
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": GOOD}


def rewarded(*rewards: float) -> Any:
    """A rollout whose rewards are these, again and again, of each scenario."""
    turns = {scenario["id"]: itertools.cycle(rewards) for scenario in SCENARIOS}

    async def run(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        trajectory = await rollout(model, scenario)
        trajectory.reward = next(turns[scenario["id"]])
        return trajectory

    return run


async def test_each_step_imitates_its_good_rollouts_and_earlier_ones_again(model: TrainableModel) -> None:
    progress, out = quiet()
    trainer = Trainer(model, rewarded(1.0, 0.0, 0.5, 2.0), SCENARIOS, progress=progress, replayed=3, **SMALL)
    report = await trainer.atrain(2)
    first, second = (iteration.metrics for iteration in report.iterations)
    assert (first["trajectories/total"], first["trajectories/trained"], first["loss/updates"]) == (8, 4, 2)
    assert "trajectories/replayed" not in first and first["loss/cross_entropy"] > 0
    assert (second["trajectories/total"], second["trajectories/trained"], second["trajectories/replayed"]) == (8, 4, 3)
    assert first["reward/mean"] == second["reward/mean"] == 0.875
    assert first["groups/no_spread"] == 0 and first["groups/trained"] == first["groups/total"] == 2
    assert [line.count("taught 50%") for line in out.getvalue().splitlines() if line.startswith("step ")] == [1, 1]


async def test_the_pages_of_a_run_that_imitates_show_its_rewards_and_what_was_left_out(model: TrainableModel) -> None:
    trainer = Trainer(model, rewarded(1.0, 0.0, 0.0, 0.0), SCENARIOS, progress=quiet()[0], **SMALL)
    report = await trainer.atrain(1)
    api = await model.api()

    def page(path: str) -> str:
        answer = httpx.get(api.url + path, headers={"authorization": f"Bearer {api.key}"}, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.text

    step = page(f"/runs/{report.run}/steps/0?split=train")
    assert "0.250" in step and "groups with a reward of at least 1" in step and "2 of 2" in step
    assert "0.250" in page(f"/runs/{report.run}")
    listed = await api.trajectories(TrajectoryQuery(model=model.name, run=report.run, split="train"))
    for record in listed.trajectories:
        left_out = "This step imitates rollouts with a reward of at least 1" in page(f"/trajectories/{record.id}")
        assert left_out == (record.reward == 0.0)


async def test_the_page_of_a_step_that_imitates_counts_groups_as_the_learner_does(model: TrainableModel) -> None:
    rewards = {"0": itertools.cycle([1.0, 0.0]), "1": itertools.repeat(1.0), "2": itertools.repeat(0.0)}

    async def run(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        trajectory = await rollout(model, scenario)
        trajectory.reward = next(rewards[scenario["id"]])
        return trajectory

    options = {**SMALL, "scenarios_per_step": 3}
    report = await Trainer(model, run, SCENARIOS, progress=quiet()[0], **options).atrain(1)
    metrics = report.iterations[0].metrics
    assert [metrics[f"groups/{name}"] for name in ("total", "trained", "all_good", "none_good")] == [3, 1, 1, 1]
    api = await model.api()
    headers = {"authorization": f"Bearer {api.key}"}
    page = httpx.get(f"{api.url}/runs/{report.run}/steps/0?split=train", headers=headers, trust_env=False, timeout=60)
    assert "<dd>1 of 3 <small>1 all good, 1 none good</small>" in page.text
    assert page.text.count("✓ gradient") == 1 and " all good</span>" in page.text and " none good</span>" in page.text


async def test_a_run_that_is_started_again_replays_the_rollouts_of_the_earlier_one(model: TrainableModel) -> None:
    for steps, rewards in ((1, (1.0, 0.0)), (2, (0.0, 0.0, 0.0, 1.0))):
        trainer = Trainer(model, rewarded(*rewards), SCENARIOS, progress=quiet()[0], replayed=3, **SMALL)
        report = await trainer.atrain(steps)
    last = report.iterations[-1].metrics
    assert (last["trajectories/trained"], last["trajectories/replayed"], report.step) == (2, 3, 2)
    page = await (await model.api()).trajectories(TrajectoryQuery(model=model.name, step=0))
    assert {(record.reward, record.place.split) for record in page.trajectories} == {(1.0, "train"), (0.0, "train")}


def test_without_a_good_rollout_no_step_is_made_and_the_run_says_why(model: TrainableModel) -> None:
    progress, out = quiet()
    trainer = Trainer(model, rewarded(0.0, 0.5), SCENARIOS, progress=progress, patience=2, **SMALL)
    report = trainer.train(3)
    assert (report.stopped, report.step) == (Stopped.NO_SIGNAL, 0)
    assert "no signal: no rollout has a reward of at least 1, so there is none to imitate" in out.getvalue()
    assert "Lower min_reward" in out.getvalue()


def test_a_schedule_may_imitate_first_and_compare_then(model: TrainableModel) -> None:
    def config(step: int) -> TrainConfig:
        return GOOD.model_copy(update={"learning_rate": 1e-5}) if step == 1 else TrainConfig(learning_rate=1e-5)

    report = Trainer(model, rewarded(1.0, 0.0), SCENARIOS, progress=quiet()[0], **{**SMALL, "config": config}).train(2)
    assert ["loss/cross_entropy" in iteration.metrics for iteration in report.iterations] == [True, False]
    assert report.iterations[1].metrics["groups/trained"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_reward": 1.0}, "min_reward chooses what loss='cross_entropy' imitates"),
        ({"min_reward": float("nan"), "loss": "cross_entropy"}, "min_reward"),
        ({"min_reward": 1.0, "loss": "cross_entropy", "overlap": True}, "overlap=True needs a policy-gradient loss"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.parse(**options)


async def test_a_request_may_replay_only_where_good_rollouts_are_imitated(model: TrainableModel) -> None:
    report = await Trainer(model, rewarded(1.0, 0.0), SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)
    api = await model.api()
    listed = await api.trajectories(TrajectoryQuery(model=model.name, run=report.run))
    group, again = GroupRecord(trajectory_ids=(listed.trajectories[0].id,)), listed.trajectories[1].id
    with pytest.raises(ValueError, match="replayed= needs loss='cross_entropy' with min_reward="):
        TrainRequest(model=model.name, groups=(group,), replayed=(again,))
    with pytest.raises(ServerError, match="named more than once"):
        await train(api, TrainRequest(model=model.name, groups=(group,), config=GOOD, replayed=(again, again)))


async def test_what_was_removed_is_not_replayed_and_the_audit_names_what_was(model: TrainableModel) -> None:
    report = await Trainer(model, rewarded(1.0, 0.0), SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)
    api = await model.api()
    listed = await api.trajectories(TrajectoryQuery(model=model.name, run=report.run))
    [first, second] = [record.id for record in listed.trajectories if record.reward == 1.0][:2]
    bad = next(record.id for record in listed.trajectories if record.reward == 0.0)
    group = GroupRecord(trajectory_ids=(first, bad))
    result = await train(
        api, TrainRequest(model=model.name, groups=(group,), config=GOOD, replayed=(second, "removed"))
    )
    assert (result.step, result.metrics["trajectories/replayed"]) == (2, 1)
    [found] = await api.ask(list[TrajectoryAudit], "POST", "/api/audit", AuditRequest(trajectory_ids=(second,)))
    assert sorted(found.trained) == [f"{model.name}@1", f"{model.name}@2"]


def test_a_run_whose_rollouts_are_all_good_is_solved_and_trains_no_replays(model: TrainableModel) -> None:
    Trainer(model, rewarded(1.0, 0.0), SCENARIOS, progress=quiet()[0], **SMALL).train(1)
    report = Trainer(model, rewarded(1.0), SCENARIOS, progress=quiet()[0], patience=2, **SMALL).train(5)
    assert (report.stopped, report.step) == (Stopped.SOLVED, 1)


def test_crashed_rollouts_make_a_success_no_less_rare() -> None:
    crashed = [ScoredRollout(f"c-{number}", "crashed", 1.0 if number == 0 else -math.inf) for number in range(8)]
    easy = [ScoredRollout(f"e-{number}", "easy", 1.0) for number in range(8)]
    draws = [draw([*crashed, *easy], 1.0, 1, random.Random(seed))[0] for seed in range(1000)]
    assert abs(draws.count("c-0") / 1000 - 0.925 / 1.325) < 0.06


def test_a_draw_prefers_rare_successes_and_forgets_nothing() -> None:
    rare = [ScoredRollout(f"rare-{number}", "hard", float(number == 0)) for number in range(10)]
    easy = [ScoredRollout(f"easy-{number}", "easy", 1.0) for number in range(10)]
    draws = [draw([*rare, *easy], 1.0, 1, random.Random(seed))[0] for seed in range(2000)]
    # Of the weights 0.95 and ten times 0.05. The deviation is 0.011.
    assert abs(draws.count("rare-0") / 2000 - 0.95 / 1.45) < 0.05
    assert set(draws) == {"rare-0", *(f"easy-{number}" for number in range(10))}
    assert sorted(draw(rare, 0.0, 99, random.Random(0))) == sorted(each.id for each in rare)
