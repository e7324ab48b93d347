"""Where clients of other APIs send their keys, and the paths that they make of a base URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import scripted_sampler

BODY: dict[str, Any] = {"model": "default", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
GEMINI = "/v1beta/models/default:generateContent"
CONTENTS: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def test_keys_come_where_each_api_has_them(tmp_path: Path) -> None:
    async with (
        scripted_sampler() as scripted,
        services_over(scripted.url, tmp_path) as services,
        serving(app.build(services, Guard("secret"))) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):

        async def status(path: str, body: Any, **headers: str) -> int:
            answer = await http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
            if answer.status_code == 401:
                assert answer.json().get("type") == ("error" if "messages" in path else None)
            return answer.status_code

        assert await status("/v1/messages", BODY, x_api_key="secret") == 200
        assert await status("/v1/messages", BODY, authorization="Bearer secret", x_api_key="other") == 200
        assert await status("/v1/messages", BODY, x_api_key="wrong") == 401
        assert await status("/v1/messages?key=secret", BODY) == 401
        assert await status(GEMINI, CONTENTS, x_goog_api_key="secret") == 200
        assert await status(f"{GEMINI}?key=secret", CONTENTS) == 200
        assert await status(f"{GEMINI}?key=wrong", CONTENTS) == 401
        assert await status(GEMINI, CONTENTS) == 401
        assert await status("/api/models?key=secret", {}) == 401


@pytest.mark.parametrize(
    ("path", "trajectory"),
    [
        ("/m/default/v1/messages", None),
        ("/m/default/t/a/v1/messages", "a"),
        ("/t/b/v1/v1/messages", "b"),
        ("/m/default/t/c/messages", "c"),
    ],
)
async def test_paths_that_clients_make_of_a_base_url(gateway: Gateway, path: str, trajectory: str | None) -> None:
    model = "default" if not path.startswith("/m/") else "claude"
    answer = await gateway.http.post(path, json=BODY | {"model": model})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-offbook-trajectory") == trajectory


async def test_a_model_whose_name_has_a_slash_can_stand_in_the_url(gateway: Gateway) -> None:
    answer = await gateway.http.post("/m/some/one@3/t/a/v1/messages", json=BODY)
    assert answer.status_code == 404 and "some/one" in answer.json()["error"]["message"]
    assert (await gateway.http.get("/m/some/one/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BODY | {"temperature": 0.3}),
        ("/v1/messages", BODY | {"temperature": 0.3}),
        ("/v1/responses", {"model": "default", "input": "hi", "temperature": 0.3}),
        ("/v1/completions", {"model": "default", "prompt": "hi"}),
        (GEMINI, CONTENTS | {"generationConfig": {"temperature": 0.3}}),
    ],
)
async def test_the_urls_temperature_holds_whatever_the_client_asks_for(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    for place in ("/t/a/at/0.0", "/m/default/t/a/at/0.7"):
        answer = await gateway.http.post(place + path, json=body)
        assert answer.status_code == 200, answer.text
    assert [call.sampling.temperature for call in await gateway.calls("a")] == [0.0, 0.7]
    assert [request["temperature"] for request in gateway.sampler.received] == [0.0, 0.7]


@pytest.mark.parametrize("temperature", ["warm", "nan", "-1"])
async def test_a_temperature_in_the_url_that_is_none_is_refused(gateway: Gateway, temperature: str) -> None:
    answer = await gateway.http.post(f"/t/a/at/{temperature}/v1/messages", json=BODY)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert "temperature" in answer.json()["error"]["message"]


async def test_the_models_can_be_listed_below_a_temperature(gateway: Gateway) -> None:
    for path in ("/v1/models", "/v1/models/default"):
        assert (await gateway.http.get(f"/t/a/at/0.0{path}")).status_code == 200
    missing = await gateway.http.post("/t/a/at/0.0/v1beta/models/default:embedContent", json=CONTENTS)
    assert missing.status_code == 404 and missing.json()["error"]["status"] == "NOT_FOUND"


@pytest.mark.parametrize("action", ["embedContent", "batchEmbedContents"])
@pytest.mark.parametrize("place", ["/v1beta", "/t/a/v1", "/m/default/t/a/v1alpha"])
async def test_embeddings_are_refused_in_the_form_of_googles_errors(gateway: Gateway, place: str, action: str) -> None:
    answer = await gateway.http.post(f"{place}/models/default:{action}", json=CONTENTS)
    error = answer.json()["error"]
    assert (answer.status_code, error.keys()) == (404, {"code", "message", "status"})
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")
    assert "embeddings are not what a language model answers" in error["message"]
