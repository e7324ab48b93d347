"""Values that JSON allows and files, paths or text do not: the client's fault by name, never a 500."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import scripted_sampler

TYPED = {"content-type": "application/json"}
HALF = "\\ud800"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/models/default/state", f'{{"value": {{"a": "{HALF}"}}}}'),
        ("PUT", "/api/models/default/state", f'{{"value": {{"{HALF}": 1}}}}'),
        ("POST", "/api/models", f'{{"name": "a", "base_model": "tiny", "lora": {{"target_modules": ["{HALF}"]}}}}'),
        ("POST", "/api/train", f'{{"id": "{HALF}", "model": "default", "groups": [{{"trajectory_ids": ["a"]}}]}}'),
        ("POST", "/api/models/default/log", f'{{"trajectory_ids": ["{HALF}"]}}'),
        (
            "POST",
            "/api/trajectories",
            f'{{"trajectories": [{{"id": "{HALF}", "model": "m", "started_at": 1, "ended_at": 2}}]}}',
        ),
    ],
)
async def test_a_lone_surrogate_is_a_400_that_says_so(gateway: Gateway, method: str, path: str, body: str) -> None:
    answer = await gateway.http.request(method, path, content=body, headers=TYPED)
    assert answer.status_code == 400, answer.text
    assert "surrogate" in answer.text or "hex escape" in answer.text
    pair = body.replace(HALF, "\\ud83d\\ude00")
    assert (await gateway.http.request(method, path, content=pair, headers=TYPED)).status_code not in (500, 503)


@pytest.mark.parametrize("name", ["x" * 5_000, "a/" + "x" * 300, "a\0b"])
async def test_a_base_model_of_any_name_is_another_base_model(gateway: Gateway, name: str) -> None:
    answer = await gateway.http.post("/api/models", json={"name": "other", "base_model": name})
    assert answer.status_code == 409 and answer.json()["error"]["param"] == "base_model"
    assert len(answer.text) < 1_000


async def test_paths_that_no_file_system_takes_are_refused_by_name(gateway: Gateway) -> None:
    path = "/api/models/default/checkpoints/1/export"
    answer = await gateway.http.post(path, json={"output": "/" + "x" * 5_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "output"
    assert (await gateway.http.get("/api/exports/" + "x" * 5_000)).status_code == 404
