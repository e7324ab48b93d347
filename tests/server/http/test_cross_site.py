"""Web pages of other sites change nothing here; SDKs, curl with a JSON content type, and our own pages do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.base.http_access import cross_site_refusal as refusal
from offbook.commands.serve import server_options
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.testing import Action, ScriptedServer, scripted_server
from tests.fakes.gateway import Gateway
from tests.server.servers import chat_body

HERE = {"host": "127.0.0.1:8000"}
JSON = {"content-type": "application/json", "content-length": "2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cross-site")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ScriptedServer]:
    with scripted_server(lambda _: Action("hi"), folder) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://evil.example/127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_what_a_browser_sends_for_another_site_is_refused(method: str, headers: dict[str, str]) -> None:
    answer = refusal(method, HERE | JSON | headers, ())
    assert answer is not None
    assert answer[:2] == (403, "origin_not_allowed")
    assert "--allow-origin" in answer[2]
    without_option = refusal(method, HERE | JSON | headers, None)
    assert without_option is not None
    assert "--allow-origin" not in without_option[2], "a server without the option does not advise it"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"},
    ],
)
def test_sdks_our_own_pages_and_allowed_origins_pass(headers: dict[str, str]) -> None:
    assert refusal("POST", HERE | JSON | headers, {"http://localhost:3000"}) is None


def test_reading_is_left_to_the_browser_which_shows_no_answer_to_other_sites() -> None:
    assert refusal("GET", HERE | {"origin": "https://evil.example"}, ()) is None


@pytest.mark.parametrize(
    "kind",
    [{}, *({"content-type": kind} for kind in ("text/plain", "application/x-www-form-urlencoded", "text/json", ""))],
)
@pytest.mark.parametrize("body", [{"content-length": "2"}, {"transfer-encoding": "chunked"}])
def test_a_body_that_is_not_said_to_be_json_is_refused(kind: dict[str, str], body: dict[str, str]) -> None:
    answer = refusal("POST", HERE | kind | body, ())
    assert answer is not None
    assert answer[:2] == (415, "content_type_not_json")


@pytest.mark.parametrize("value", ["evil", "ftp://a", "http://a/path", "http://", "http://a, http://a"])
def test_an_origin_that_no_browser_sends_is_an_error_that_names_the_flag(value: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin"):
        server_options({"allow_origin": value})


def test_a_forms_post_changes_no_reward_and_seals_no_rollout(server: ScriptedServer) -> None:
    body = json.dumps({"trajectories": [{"id": "traj-x", "reward": 1.0}]})
    for headers in (
        {"content-type": "text/plain", "origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"content-type": "application/json", "origin": "https://evil.example"},
    ):
        for path in ("/api/trajectories", "/v1/chat/completions", "/api/train"):
            assert httpx.post(server.url + path, content=body, headers=headers).status_code == 403
    assert (
        httpx.post(server.url + "/api/trajectories", content=body, headers={"content-type": "text/plain"}).status_code
        == 415
    )
    assert httpx.get(server.url + "/api/trajectories").json()["trajectories"] == []


def test_the_openai_sdk_and_ours_pass(server: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert client.chat.completions.create(**chat_body()).choices

    async def state() -> dict[str, object]:
        model = offbook.TrainableModel(name="policy", base_model="tiny", backend=offbook.RemoteBackend(server.url))
        await model.overwrite_state({"a": 1})
        return await model.read_state() or {}

    assert asyncio.run(state()) == {"a": 1}


async def test_an_allowed_origin_gets_the_headers_that_its_browser_asks_for(gateway: Gateway) -> None:
    allowed = replace(
        gateway.services,
        options=gateway.services.options.model_copy(update={"allow_origin": ("http://localhost:3000",)}),
    )
    transport = httpx.ASGITransport(app.build(allowed, Guard(None)))
    asked = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.options("/v1/chat/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")
        foreign = await client.options("/v1/chat/completions", headers=asked | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers


def test_state_written_by_many_at_once_is_one_of_theirs_whole(server: ScriptedServer, folder: Path) -> None:
    url = f"{server.url}/api/models/policy/state"
    states = [{"writer": number, "text": "x" * 2000} for number in range(64)]
    with ThreadPoolExecutor(32) as pool:
        written = list(pool.map(lambda state: httpx.put(url, json={"value": state}, timeout=60).status_code, states))
    assert set(written) == {200}
    assert httpx.get(url).json()["value"] in states
    assert not list(next(folder.glob("*/models/policy")).glob(".*.part"))
