"""The key of one trajectory, which programs get: it opens the model calls of that trajectory and nothing else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook import Command, RemoteBackend, TrainableModel
from offbook.base.http_access import trajectory_key
from offbook.server.http import app
from offbook.server.http.auth import Access, Guard
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from tests.fakes.scripted_sampler import scripted_sampler

CHAT = ("chat/completions", {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})
RESPONSE = ("responses", {"model": "default", "input": "a secret of mine"})


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with (
        scripted_sampler() as scripted,
        services_over(scripted.url, tmp_path) as services,
        serving(app.build(services, Guard("secret"))) as url,
    ):
        yield url


def http(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, headers={"authorization": f"Bearer {key}"})


async def test_it_opens_the_model_calls_of_its_trajectory_and_nothing_else(url: str) -> None:
    async with http(url, trajectory_key("secret", "mine")) as program, http(url, "secret") as owner:
        for place in ("/t/mine/v1", "/m/default/t/mine/v1", "/t/mine/at/0.0/v1"):
            assert (await program.post(f"{place}/{CHAT[0]}", json=CHAT[1])).status_code == 200
        assert (await program.get("/t/mine/v1/models")).status_code == 200
        assert (await program.post("/t/mine/v1/embeddings", json={})).status_code == 404
        assert len((await owner.get("/api/trajectories/mine")).json()["calls"]) == 3
        await owner.post(f"/t/other/v1/{CHAT[0]}", json=CHAT[1])
        for path in ("/t/other/v1", "/v1", "/m/default/v1", "/m/t/mine/v1", "/t/mine/../other/v1", "/x/t/mine/v1"):
            refused = await program.post(f"{path}/{CHAT[0]}", json=CHAT[1])
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_of_one_trajectory"), path
        header = {"x-offbook-trajectory": "other"}
        assert (await program.post(f"/t/mine/v1/{CHAT[0]}", json=CHAT[1], headers=header)).status_code == 400
        assert len((await owner.get("/api/trajectories/other")).json()["calls"]) == 1


async def test_it_is_refused_at_every_other_route(url: str) -> None:
    async with http(url, trajectory_key("secret", "mine")) as program, http(url, "secret") as owner:
        routes = (await owner.get("/openapi.json")).json()["paths"]
        closed = [path for path in routes if not path.startswith("/t/") and path != "/health"]
        assert len(closed) > 20
        for path in [*closed, "/", "/openapi.json", "/sign-out", "/api/trajectories/mine"]:
            for method in ("GET", "POST"):
                refused = await program.request(method, re.sub("{.*?}", "mine", path))
                assert refused.status_code == 403, (method, path)


async def test_responses_of_other_trajectories_are_not_found_by_it(url: str) -> None:
    async with http(url, trajectory_key("secret", "mine")) as program, http(url, "secret") as owner:
        other = (await owner.post(f"/t/other/v1/{RESPONSE[0]}", json=RESPONSE[1])).json()["id"]
        own = (await program.post(f"/t/mine/v1/{RESPONSE[0]}", json=RESPONSE[1])).json()["id"]
        for name, status in ((own, 200), (other, 404)):
            follows: dict[str, Any] = {"model": "default", "input": "and?", "previous_response_id": name}
            assert (await program.post("/t/mine/v1/responses", json=follows)).status_code == status
            items = [{"type": "item_reference", "id": f"msg_{name.removeprefix('resp_')}_0"}]
            referring = {"model": "default", "input": [*items, {"role": "user", "content": "and?"}]}
            answer = await program.post("/t/mine/v1/responses", json=referring)
            assert (answer.status_code == 200) == (status == 200), answer.text


def test_it_comes_of_the_owners_key_and_ends_with_it() -> None:
    old, new = Guard("old", ("looker",)), Guard("new", ("looker",))

    def allowed(guard: Guard, key: str, method: str = "POST") -> bool:
        headers = {"x-api-key": trajectory_key(key, "mine")}
        decided = guard.decide("/t/mine/v1/messages", headers, method)
        return isinstance(decided, Access) and decided.trajectory == "mine"

    assert allowed(old, "old") and not allowed(old, "new")
    assert allowed(new, "new") and not allowed(new, "old")
    assert not allowed(new, "looker", "GET"), "a viewer's key makes none"


async def test_a_program_gets_it_instead_of_the_servers_key(url: str, tmp_path: Path) -> None:
    code = (
        "import json, os, urllib.error, urllib.request\n"
        "def ask(path, body=None):\n"
        "    headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
        f"    request = urllib.request.Request({url!r} + path, body, headers)\n"
        "    try: return urllib.request.urlopen(request).status\n"
        "    except urllib.error.HTTPError as error: return error.code\n"
        f"body = json.dumps({CHAT[1]!r}).encode()\n"
        "paths = ['/t/' + os.environ['OFFBOOK_TRAJECTORY'] + '/v1/chat/completions', '/v1/chat/completions']\n"
        "print([*(ask(path, body) for path in paths), ask('/api/models'), 'secret' in str(os.environ)])\n"
    )
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(url, "secret"))
    command = Command([sys.executable, "-S", "-c", code], reward="exit", folder=str(tmp_path), env={"PATH": os.defpath})
    trajectory = await command(model, "x")
    assert trajectory.logs == ["stdout of the program:\n[200, 403, 403, False]\n"]
    assert trajectory.reward == 1.0
