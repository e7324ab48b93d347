"""Finished rollouts, updates and evaluations, written through the server's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbook.base.types import TrainResult
from offbook.base.wire import TrainStatus
from offbook.commands.main import app
from tests.fakes.gateway import Gateway


def record(name: str, reward: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    place = {"run": "run-1", "split": "train", "step": 0, "scenario": "s", "group": "g-1", "index": 0}
    return {
        "id": name,
        "model": "default",
        "reward": reward,
        "started_at": 1_700_000_000.0,
        "ended_at": 1_700_000_002.0,
        "place": place | fields.pop("place", {}),
    } | fields


async def finish(gateway: Gateway, *records: dict[str, Any]) -> None:
    answer = await gateway.http.post("/api/trajectories", json={"trajectories": list(records)})
    assert answer.status_code == 200, answer.text


async def trained(gateway: Gateway, run: str, step: int, rewards: tuple[float, ...], model: str = "default") -> None:
    """Store the rollouts of a run at `step`, and the update that made the next step of them."""
    ids = [f"{run}-{step}-{index}" for index in range(len(rewards))]
    place = {"run": run, "step": step, "group": f"{run}-{step}"}
    await finish(gateway, *(record(i, r, model=model, place=place) for i, r in zip(ids, rewards, strict=True)))
    metrics = {"reward/mean": sum(rewards) / len(rewards)}
    result = TrainResult(model=model, step=step + 1, applied=True, metrics=metrics)
    status = TrainStatus(id=f"train-{run}-{step}", model=model, state="done", result=result)
    await gateway.services.store.save_train(status, json.dumps({"groups": [{"trajectory_ids": ids}]}))


async def evaluated(
    gateway: Gateway, run: str, step: int, rewards: tuple[float, ...], model: str = "default", *, log: bool = True
) -> None:
    ids = [f"{run}-{index}" for index in range(len(rewards))]
    place = {"run": run, "step": step, "split": "val"}
    places = [place | {"group": f"{run}-{index}", "scenario": str(index)} for index in range(len(rewards))]
    records = [record(i, r, model=model, place=p) for i, r, p in zip(ids, rewards, places, strict=True)]
    await finish(gateway, *records)
    if log:
        metrics = {"val/reward": sum(rewards) / len(rewards)}
        entry = {"split": "val", "step": step, "metrics": metrics, "trajectory_ids": ids}
        assert (await gateway.http.post(f"/api/models/{model}/log", json=entry)).status_code == 200


def runs_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `offbook runs --json` prints."""
    capsys.readouterr()
    app(["runs", "--dir", str(folder), "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)
