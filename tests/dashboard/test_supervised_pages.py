"""What the pages and the terminal show of supervised training, over records that were written through the server's API."""

from __future__ import annotations

import asyncio
import html
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbook.base.types import TrainResult
from offbook.base.wire import TrainStatus
from offbook.commands.main import app
from offbook.server.views.numbers import DASH, MINUS
from tests.fakes.finished import finish, record, runs_json, trained
from tests.fakes.gateway import Gateway

SUPERVISED = {"loss": "cross_entropy"}


async def imitated(gateway: Gateway, step: int, loss: float, run: str = "sft-1", *, new: bool = True) -> None:
    """Store an update at `step` on two examples; with new=False the examples of step 0 once more."""
    ids = [f"{run}-{step if new else 0}-{index}" for index in range(2)]
    if new:
        await finish(gateway, *(record(id, None, place={"run": run, "step": step, "group": None}) for id in ids))
    metrics = {
        "loss/cross_entropy": loss,
        "loss/value": loss,
        "calls/trained": 2.0,
        "groups/trained": 2.0,
        "groups/total": 2.0,
    }
    result = TrainResult(model="default", step=step + 1, applied=True, metrics=metrics)
    await save(gateway, f"{run}-0-{step}", result, ids, evaluate=False)


async def held_out(gateway: Gateway, step: int, loss: float, run: str = "sft-1") -> None:
    """Store a measurement at `step` as `train_sft` makes it: its examples are recorded once, at step 0."""
    ids = [f"{run}-held-{index}" for index in range(3)]
    if step == 0:
        place = {"run": run, "step": 0, "split": "held-out", "group": None}
        await finish(gateway, *(record(id, None, place=place) for id in ids))
    metrics = {"loss/cross_entropy": loss}
    result = TrainResult(
        model="default", step=step, applied=False, reason="evaluated", why="only measured", metrics=metrics
    )
    await save(gateway, f"{run}-held-out-{step}", result, ids, evaluate=True)
    entry = {"split": "held-out", "step": step, "metrics": {"held-out/cross_entropy": loss}, "trajectory_ids": ids}
    assert (await gateway.http.post("/api/models/default/log", json=entry)).status_code == 200


async def save(gateway: Gateway, id: str, result: TrainResult, ids: list[str], *, evaluate: bool) -> None:
    status = TrainStatus(id=id, model="default", state="done", result=result)
    groups = [{"trajectory_ids": [id]} for id in ids]
    request = {"groups": groups, "config": SUPERVISED, "evaluate": evaluate}
    await gateway.services.store.save_train(status, json.dumps(request))


@pytest.fixture
async def training(gateway: Gateway) -> Gateway:
    """Two epochs of two batches, with the held-out loss before, between and after."""
    await held_out(gateway, 0, 2.5)
    await imitated(gateway, 0, 2.25)
    await imitated(gateway, 1, 2.0)
    await held_out(gateway, 2, 1.75)
    await imitated(gateway, 2, 1.5, new=False)
    await held_out(gateway, 3, 1.25)
    return gateway


async def text_of(gateway: Gateway, path: str) -> str:
    page = await gateway.http.get(path)
    assert page.status_code == 200, page.text
    return page.text


async def test_the_list_of_runs_shows_the_loss_where_a_reward_would_stand(
    training: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = await text_of(training, "/")
    assert (
        '1.500 <small title="Cross-entropy, nats per token">loss' in page
        and "1.250 <small>cross-entropy, step 3</small>" in page
    )
    assert f"{MINUS}0.500 in 1 step" in page
    [line] = await asyncio.to_thread(runs_json, tmp_path, capsys)
    assert (line["loss"], line["reward"], line["evaluation"], line["measure"]) == (1.5, None, 1.25, "cross-entropy")
    await asyncio.to_thread(partial(app, standalone_mode=False), ["runs", "--dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "loss 1.500" in shown and "loss 1.250" in shown


async def test_a_run_that_imitates_by_rewards_shows_its_reward_and_its_evaluation(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["good-0-0", "good-0-1"]
    place = {"run": "good", "step": 0, "group": "g"}
    await finish(gateway, *(record(id, reward, place=place) for id, reward in zip(ids, (1.0, 0.5), strict=True)))
    metrics = {"loss/cross_entropy": 0.25, "reward/mean": 0.75, "groups/trained": 1.0, "groups/total": 1.0}
    status = TrainStatus(
        id="good-0",
        model="default",
        state="done",
        result=TrainResult(model="default", step=1, applied=True, metrics=metrics),
    )
    request = {"groups": [{"trajectory_ids": ids}], "config": {**SUPERVISED, "min_reward": 1.0}}
    await gateway.services.store.save_train(status, json.dumps(request))
    await finish(gateway, record("held", 1.0, place={"run": "good", "step": 1, "split": "val"}))
    entry = {"split": "val", "step": 1, "metrics": {"val/reward": 1.0}, "trajectory_ids": ["held"]}
    assert (await gateway.http.post("/api/models/default/log", json=entry)).status_code == 200
    [line] = await asyncio.to_thread(runs_json, tmp_path, capsys)
    assert (line["loss"], line["reward"], line["evaluation"]) == (None, 0.75, 1.0)
    page = await text_of(gateway, "/runs/good")
    assert "<dt>Reward</dt><dd>0.750" in page and "reward at step 1" in page


async def test_a_runs_page_has_both_losses_and_no_measurement_is_an_update_that_learned_nothing(
    training: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await text_of(training, "/runs/sft-1")
    assert "nothing learned" not in page and "nothing was learned" not in page and "only measured" not in page
    assert "<dt>Cross-entropy</dt><dd>1.500" in page and "cross-entropy at step 3" in page
    found = re.search(r'id="chart-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    [run] = json.loads(html.unescape(found[1]))
    charts = {chart["key"]: chart["parts"] for chart in run["charts"]}
    assert not charts.keys() & {"reward", "evaluation", "loss"}  # the loss is the cross-entropy
    train, held = charts["cross_entropy"]
    assert (run["x"][train["x"]]["step"], train["y"]) == ([1, 2, 3], [2.25, 2.0, 1.5])
    assert (held["label"], run["x"][held["x"]]["step"], held["y"]) == ("held-out", [0, 2, 3], [2.5, 1.75, 1.25])
    steps, evaluations = page.split('<h2 id="eval-h">')
    assert ">Reward<" not in steps.split('id="steps"')[1]
    assert [cell in steps for cell in ("2.250", "2.000", "1.500")] == [True] * 3
    assert [cell in evaluations for cell in ("2.500", "1.750", "1.250")] == [True] * 3
    assert 'href="/runs/sft-1/steps/0"' in evaluations and 'href="/runs/sft-1/steps/3"' not in evaluations
    live = (await training.http.get("/pages/data/runs/sft-1")).json()
    assert len(live["lines"]) == 3 and live["lines"][0]["cells"][0] == "1.500"
    monkeypatch.setenv("COLUMNS", "200")
    await asyncio.to_thread(partial(app, standalone_mode=False), ["show", "sft-1", "--dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "nothing" not in shown and all(loss in shown for loss in ("2.250", "2.000", "1.500", "2.500", "1.750"))


async def test_a_steps_page_has_the_loss_of_its_updates_and_of_the_held_out_examples(training: Gateway) -> None:
    page = await text_of(training, "/runs/sft-1/steps/0")
    assert "<dt>Cross-entropy</dt><dd>1.500" in page and "2.250 in the first of 2 updates" in page
    assert "<dt>Held-out cross-entropy</dt><dd>2.500" in page and "✓ gradient" in page
    assert "made step 1 of default" in page and "made step 3 of default" in page
    held = await text_of(training, "/runs/sft-1/steps/0?split=held-out")
    assert f"{DASH} held out" in held and "<dt>Held-out cross-entropy</dt><dd>2.500" in held
    for absent in ("nothing learned", "rewards differ", "none scored", "<dt>Reward</dt>"):
        assert absent not in page and absent not in held, absent


async def test_an_examples_page_does_not_ask_for_a_reward(training: Gateway) -> None:
    assert "held out: its loss is measured" in await text_of(training, "/trajectories/sft-1-held-0")
    assert "no reward, so it trains nothing" not in await text_of(training, "/trajectories/sft-1-1-0")


async def test_examples_chosen_from_a_reinforced_run_leave_its_rewards_as_they_were(gateway: Gateway) -> None:
    await trained(gateway, "both", 0, (0.0, 0.5))
    chosen: list[Any] = ["both-0-1"]
    metrics = {"loss/cross_entropy": 0.75, "reward/mean": 0.5}
    result = TrainResult(model="default", step=2, applied=True, metrics=metrics)
    await save(gateway, "sft-2-0-0", result, chosen, evaluate=False)
    page = await text_of(gateway, "/runs/both")
    assert "<dt>Cross-entropy</dt><dd>0.750" in page
    live = (await gateway.http.get("/pages/data/runs/both")).json()
    reward = next(chart["parts"][0]["y"] for chart in live["charts"] if chart["key"] == "reward")
    assert reward == [0.25, None]
    assert [line["cells"][:2] for line in live["lines"]] == [["0.750", DASH], [DASH, "0.250"]]
