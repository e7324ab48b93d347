"""The runs page, over records that were written through the server's API."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from offbook.base.wire import TrainStatus
from offbook.commands.main import app
from offbook.server.views import run_summary
from offbook.server.views.run_index import LoggedEvaluation
from offbook.server.views.run_summary import trend
from offbook_dashboard.run_charts import costs_by_step, evaluations_by_split, score
from tests.dashboard.viewing import viewing
from tests.fakes.finished import evaluated, finish, record, runs_json, trained
from tests.fakes.gateway import Gateway


async def test_runs_are_listed_newest_first_with_their_rollouts(gateway: Gateway) -> None:
    await finish(gateway, record("a"), record("b"))
    await finish(gateway, record("c", place={"run": "run-2"}))
    page = await gateway.http.get("/")
    assert page.status_code == 200
    assert page.text.index("run-2") < page.text.index("run-1")
    assert 'href="/runs/run-1"' in page.text


async def test_a_name_that_is_markup_stays_text(gateway: Gateway) -> None:
    name = "<script>alert(1)</script>/~x"
    await finish(gateway, record("a", place={"run": name}))
    page = await gateway.http.get("/")
    assert "<script>alert" not in page.text and "&lt;script&gt;alert(1)" in page.text
    found = await gateway.http.get("/runs/%3Cscript%3Ealert%281%29%3C~2Fscript%3E~2F~7Ex")
    assert found.status_code == 200 and "<script>alert" not in found.text


async def test_an_unknown_run_is_a_page_that_says_so(gateway: Gateway) -> None:
    page = await gateway.http.get("/runs/nowhere")
    assert page.status_code == 404 and "There is no run &#39;nowhere&#39; here" in page.text


async def test_pages_carry_the_policy_and_no_inline_script_or_style(gateway: Gateway) -> None:
    await finish(gateway, record("a"))
    for path in ("/", "/runs/run-1"):
        page = await gateway.http.get(path)
        assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
        assert " style=" not in page.text and "<style" not in page.text and " onclick" not in page.text


async def test_a_run_is_active_while_the_process_of_the_directorys_server_lives(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    await trained(gateway, "run-1", 0, (0.0, 1.0))
    await finish(gateway, record("later", place={"step": 1}))
    running = TrainStatus(id="train-run-1-1", model="default", state="running")
    await gateway.services.store.save_train(running, json.dumps({"groups": [{"trajectory_ids": ["later"]}]}))
    folder = gateway.services.options.dir
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, status in (
        (None, "interrupted"),
        (os.getpid(), "training"),
        (ended.pid, "interrupted"),
        (1 << 70, "interrupted"),
    ):
        if pid is not None:
            (folder / "server.json").write_text(json.dumps({"pid": pid, "url": "http://127.0.0.1:1"}))
        [run] = await asyncio.to_thread(runs_json, folder, capsys)
        assert run["status"]["text"] == status
        with viewing(folder) as url:
            page = await asyncio.to_thread(httpx.get, url, trust_env=False)
        assert ("is at http://127.0.0.1:1." in page.text) == (status == "training")


async def test_a_run_has_ended_when_its_trainer_says_so_and_is_active_or_stopped_otherwise(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gateway.services.options.dir

    async def status() -> str:
        (folder / "server.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
        [run] = await asyncio.to_thread(runs_json, folder, capsys)
        return run["status"]["text"]

    monkeypatch.setattr(run_summary, "ACTIVE_SECONDS", math.inf)
    await trained(gateway, "run-1", 0, (0.0, 1.0))
    assert await status() == "active"
    assert (await gateway.http.post("/api/runs/ended", json={"run": "run-1"})).status_code == 200
    assert await status() == "ended"
    await trained(gateway, "run-1", 1, (0.0, 1.0))  # the same run goes on
    assert await status() == "active"
    monkeypatch.setattr(run_summary, "ACTIVE_SECONDS", 0.0)
    assert await status() == "stopped"


@pytest.mark.parametrize("log", [True, False], ids=["ended", "before it has ended"])
async def test_an_evaluation_shows_its_mean_and_not_its_last_rollout(
    log: bool, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await evaluated(gateway, "eval-1", 0, (0.0, 0.0, 0.074, 1.0), log=log)
    [line] = await asyncio.to_thread(runs_json, tmp_path, capsys)
    assert line["reward"] == pytest.approx(0.2685)
    assert line["evaluation"] == (pytest.approx(0.2685) if log else None)
    assert line["status"]["text"] == "evaluation"
    for path in ("/", "/runs/eval-1"):
        page = (await gateway.http.get(path)).text
        assert "1.000" not in page and ("0.268" in page or "0.269" in page), path
        assert "rollouts only" not in page
    await asyncio.to_thread(partial(app, standalone_mode=False), ["show", "eval-1", "--dir", str(tmp_path)])
    shown = capsys.readouterr().out
    of_the_run, of_its_rollouts = shown.split("The worst and the best of 4 rollouts")
    assert "1.000" not in of_the_run and "Nothing was trained" not in of_the_run
    assert "1.000" in of_its_rollouts


async def test_a_run_without_an_update_shows_the_mean_of_its_newest_step(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await finish(gateway, record("old", 0.0), *(record(f"t{i}", r, place={"step": 1}) for i, r in enumerate((0.5, 1))))
    [line] = await asyncio.to_thread(runs_json, tmp_path, capsys)
    assert (line["reward"], line["status"]["text"]) == (0.75, "not trained")


async def test_the_trend_is_the_same_in_the_list_on_the_runs_page_and_in_the_terminal(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    await trained(gateway, "first", 0, (0.0, 0.5))
    await trained(gateway, "first", 1, (0.25, 0.75))
    text = str(trend([0.25, 0.5]))
    assert text == "+0.250 in 1 step"
    for path in ("/", "/runs/first"):
        page = (await gateway.http.get(path)).text
        assert text in page, path
    for words in (["runs", "--dir", str(tmp_path)], ["show", "first", "--dir", str(tmp_path)]):
        await asyncio.to_thread(partial(app, standalone_mode=False), words)
        assert text in capsys.readouterr().out


def test_a_step_that_a_run_begun_again_evaluates_once_more_is_one_point_of_the_curve() -> None:
    def logged(step: int, reward: float, at: float) -> LoggedEvaluation:
        return LoggedEvaluation("m", "run-1", "val", step, at, {"val/reward": reward}, 2)

    curve = evaluations_by_split([logged(0, 0.1, 1.0), logged(1, 0.2, 2.0), logged(1, 0.3, 3.0), logged(2, 0.4, 4.0)])
    assert [(entry.step, score(entry)) for entry in curve["val"]] == [(0, 0.1), (1, 0.3), (2, 0.4)]


def test_costs_of_rollouts_of_the_same_step_are_added_up() -> None:
    def paid(step: int, metrics: dict[str, float]) -> LoggedEvaluation:
        return LoggedEvaluation("m", "run-1", "train", step, 1.0, metrics, 1)

    judge, user = {"costs/judge": 0.5, "llms/judge/questions": 2.0}, {"costs/user": 0.25}
    summed = costs_by_step([paid(0, judge), paid(1, judge | user), paid(1, judge), paid(2, {"val/reward": 1.0})])
    assert [(entry.step, entry.metrics) for entry in summed] == [
        (0, {"costs/judge": 0.5}),
        (1, {"costs/judge": 1.0, "costs/user": 0.25}),
    ]
