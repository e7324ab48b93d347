"""A paid model's server that lies: no answer of it shows the key, runs in our origin, or reaches another path."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fakes.lying_provider import LyingProvider, lying_provider

from .conftest import Opening, Passing

KEY = "pk-4821/never+shown=77"
"""Of no well-known form, so that nothing but its value tells it."""
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
BROKEN: dict[str, Sequence[bytes]] = {
    "a bad status line": [b"HTTP/1.1 OK KEY\r\n\r\n"],
    "a bad header": [OK + b"KEY\r\n\r\n{}"],
    "no HTTP": [b"220 KEY ready\r\n"],
    "a header beyond 8 KB": [OK + b"x-long: KEY" + b"k" * 9_000 + b"\r\n\r\n{}"],
    "two lengths": [OK + b"content-length: 2\r\ncontent-length: 9\r\nx-key: KEY\r\n\r\n{}       "],
    "a length and chunks": [
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\nx-key: KEY\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ],
    "nothing": [],
    "half a head": [OK + b"x-key: KEY"],
}
"""What is no answer at all."""
BROKEN_OFF: dict[str, Sequence[bytes]] = {
    "the middle of a body": [OK + b"content-length: 999\r\n\r\n", b'{"text": "KEY'],
    "the middle of a chunk": [OK + b"transfer-encoding: chunked\r\n\r\n", b'ff\r\n{"text": "KEY"'],
    "a bad chunk": [OK + b"transfer-encoding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"KEY\r\n"],
    "a bad gzip": [
        OK + b"content-encoding: gzip\r\ncontent-length: 30\r\n\r\n",
        gzip.compress(b"{}")[:12] + b"KEY".ljust(18),
    ],
}
"""Answers that break off after their head."""


@asynccontextmanager
async def lied_to(passing: Opening) -> AsyncGenerator[tuple[Passing, LyingProvider]]:
    async with lying_provider() as provider:
        model = f"openai/gpt-4.1?api_base={provider.url}/v1"
        async with passing(model=model, environ={"OPENAI_API_KEY": KEY}) as route:
            yield route, provider


async def noted(route: Passing, calls: int) -> None:
    """Wait until so many calls are counted: the client has an answer a moment before."""
    async with asyncio.timeout(10):
        while route.gateway.traffic.counts.calls < calls:
            await asyncio.sleep(0)


def kept(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def test_no_broken_answer_shows_the_providers_key(
    passing: Opening, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with lied_to(passing) as (route, provider):
        for provider.pieces in BROKEN.values():
            answer = await route.chat(thread="t-1")
            shown = answer.text + str(answer.headers)
            assert answer.status_code == 502 and "127.0.0.1" in answer.json()["error"]["message"], shown
            assert answer.json()["error"]["code"] == "upstream_unreachable"
            assert KEY not in shown and "Bearer" not in shown
        for provider.pieces in BROKEN_OFF.values():
            try:
                answer = await route.chat(thread="t-1")
            except httpx.HTTPError as error:
                assert KEY not in repr(error)
            else:  # it came in one piece, and was seen to be broken before anything was sent
                assert answer.status_code == 502 and KEY not in answer.text
        provider.silent = True
        with pytest.raises(httpx.ReadTimeout):
            await route.http.post("/v1/chat/completions", json={}, timeout=0.2)
        await noted(route, len(BROKEN) + len(BROKEN_OFF) + 1)
        assert len(provider.heads) >= len(BROKEN) + len(BROKEN_OFF) + 1
        assert all(f"Bearer {KEY}".encode() in head for head in provider.heads)
        assert (await route.state()).failed == len(BROKEN) + len(BROKEN_OFF)
    assert KEY not in caplog.text and "Traceback" not in caplog.text
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == len(BROKEN) + len(BROKEN_OFF), "a line for each"
    assert KEY.encode() not in kept(tmp_path)


async def test_a_key_that_the_provider_echoes_is_masked_in_headers_and_bodies_however_they_are_cut(
    passing: Opening, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    choice = {"index": 0, "message": {"role": "assistant", "content": f"You are {KEY}."}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    lengths = b"content-length: %d\r\nx-request-id: KEY\r\nretry-after: 7\r\n\r\n" % len(body)
    delta = json.dumps({"choices": [{"index": 0, "delta": {"content": f"{KEY}, {KEY}"}, "finish_reason": "stop"}]})
    events = [b"data: " + delta.encode() + b"\n\n", b"data: [DONE]\n\n"]
    zipped = gzip.compress(body)
    async with lied_to(passing) as (route, provider):
        answers: list[httpx.Response] = []
        for pieces in (
            [OK + lengths, body],
            [b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\n" + lengths, body],
            [OK + lengths, *(body[at : at + 1] for at in range(len(body)))],
            [STREAM, *events],
            [STREAM, *(bytes([byte]) for byte in b"".join(events))],
            [OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(zipped), zipped],
        ):
            provider.pieces = pieces
            answers.append(await route.chat(thread="t-1"))
            assert KEY not in answers[-1].text + str(answers[-1].headers)
        assert [answer.status_code for answer in answers] == [200, 401, 200, 200, 200, 200]
        assert all("[redacted key]" in answer.text for answer in answers)
        assert answers[0].headers["retry-after"] == "7" and "[redacted key]" in answers[0].headers["x-request-id"]
        assert answers[0].json() == answers[2].json() == answers[5].json()
        assert answers[3].content == answers[4].content and answers[3].text.endswith("data: [DONE]\n\n")
        await noted(route, 6)
        assert len((await route.threads())[0].calls) == 5
    assert KEY not in caplog.text and KEY.encode() not in kept(tmp_path)


async def test_a_key_that_a_client_sends_itself_is_masked_where_the_provider_echoes_it(
    passing: Opening, tmp_path: Path
) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": f"You are {KEY}."}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    async with lying_provider() as provider, passing(model=f"openai/x?api_base={provider.url}/v1") as route:
        provider.pieces = [OK + b"content-length: %d\r\nx-request-id: KEY\r\n\r\n" % len(body), body]
        own = {"authorization": f"Bearer {KEY}"}
        answer = await route.http.post("/v1/chat/completions", json={"model": "x", "messages": []}, headers=own)
        assert f"Bearer {KEY}".encode() in provider.heads[0]
        assert "[redacted key]" in answer.text and KEY not in answer.text + str(answer.headers)
        await noted(route, 1)
        assert len(await route.threads()) == 1
    assert KEY.encode() not in kept(tmp_path)


PAGE = b"<script>document.title = 'ran'</script>"


async def test_only_what_the_apis_need_is_passed_of_an_answer(passing: Opening) -> None:
    foreign = (
        b"set-cookie: offbook_session=1\r\naccess-control-allow-origin: *\r\nlink: </x.css>; rel=stylesheet\r\n"
        b"refresh: 0;url=/\r\ncontent-security-policy: default-src *\r\nservice-worker-allowed: /\r\nx-secret: 1\r\n"
        b"connection: x-request-id\r\nx-request-id: req_1\r\nrequest-id: req_2\r\nretry-after-ms: 7\r\nserver: p\r\n"
        b"x-ratelimit-remaining-tokens: 9\r\nanthropic-ratelimit-requests-limit: 8\r\n"
    )
    async with lied_to(passing) as (route, provider):
        provider.pieces = [OK + foreign + b"content-length: 2\r\n\r\n{}"]
        answer = await route.http.get("/v1/models/x")
        safe = {
            "x-content-type-options": "nosniff",
            "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        }
        assert {name: value for name, value in answer.headers.items() if name != "date"} == safe | {
            "content-type": "application/json",
            "content-length": "2",
            "request-id": "req_2",
            "retry-after-ms": "7",
            "x-ratelimit-remaining-tokens": "9",
            "anthropic-ratelimit-requests-limit": "8",
        }
        page = b"content-type: text/html\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % len(PAGE) + PAGE
        for head, status in ((b"200 OK", 502), (b"503 Later", 503), (b"404 No", 404)):
            provider.pieces = [b"HTTP/1.1 " + head + b"\r\n" + page]
            answer = await route.http.get("/v1/models/x")
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
            assert "text/html" in answer.json()["error"]["message"] and "script" not in answer.text
            assert safe.items() <= dict(answer.headers).items()
        provider.pieces = [b"HTTP/1.1 302 Found\r\nlocation: https://example.com/\r\ncontent-length: 0\r\n\r\n"]
        answer = await route.chat()
        assert answer.status_code == 502 and "location" not in answer.headers and "redirect" in answer.text
        provider.pieces = [b"HTTP/1.1 999 Denied\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"]
        answer = await route.chat()
        assert answer.status_code == 502 and "status 999" in answer.text
        for path in ("/r/desk/v1/files", "/r/none/v1/models"):
            answer = await route.http.get(route.url + path)
            assert answer.status_code == 404 and safe.items() <= dict(answer.headers).items()


PATHS = [
    "/v1/models/../files",
    "/v1/models/%2e%2e/files",
    "/v1/models/..%2ffiles",
    "/v1/models/..%2Ffiles",
    "/v1/models/%252e%252e/files",
    "/v1/models/..%252ffiles",
    "/v1/models/..\\files",
    "/v1/models/..%5cfiles",
    "/v1/models/..;/files",
    "/v1/models/.;x/files",
    "/v1/models/x%3f/../files",
    "/v1/models/x%23y",
    "/v1/models/x%00",
    "/v1/models/x%0d%0ahost:%20y",
    "/v1/models//files",
    "/v1/models/./files",
    "/v1/models/%c0%ae%c0%ae/files",
    "/v1/responses/../files",
    "/v1/responses/resp_1/../../files",
    "/v1%2ffiles",
    "/v1beta/models/../../v1/files",
]


def raw_answer(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Send a path as it is written: httpx and browsers would normalize it."""
    connection = http.client.HTTPConnection(str(urlsplit(url).hostname), urlsplit(url).port, timeout=20)
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in ({"content-type": "application/json", "content-length": "2"} | (headers or {})).items():
        connection.putheader(name, value)
    connection.endheaders(b"{}")
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


async def test_a_path_that_leaves_the_known_routes_is_not_passed_on_in_any_spelling(passing: Opening) -> None:
    async with lied_to(passing) as (route, provider):
        provider.pieces = [OK + b"content-length: 2\r\n\r\n{}"]
        for path in PATHS:
            status, body = await asyncio.to_thread(raw_answer, route.url, "GET", f"/r/desk{path}")
            assert (status, provider.heads) == (404, []), path
            assert b"not passed on" in body
        for path in (*PATHS, "/m/other", "/t/one"):
            for end in (":generateContent", "/v1/chat/completions"):
                status, _ = await asyncio.to_thread(raw_answer, route.url, "POST", f"/r/desk{path}{end}")
                assert (status, provider.heads) == (404, []), path + end
        for path in ("/r%2fdesk/v1/models", "/r/desk%2fv1/models"):
            status, _ = await asyncio.to_thread(raw_answer, route.url, "GET", path)
            assert status == 404 and provider.heads == [], path


async def test_the_path_that_was_checked_is_the_path_that_is_forwarded(passing: Opening) -> None:
    async with lied_to(passing) as (route, provider):
        provider.pieces = [OK + b"content-length: 2\r\nconnection: close\r\n\r\n{}"]
        for method, path, forwarded in (
            ("GET", "/v1/models", "/v1/models"),
            ("GET", "/v1/models/ft:gpt-4.1:org::id", "/v1/models/ft:gpt-4.1:org::id"),
            ("GET", "/v1/models/meta-llama%2FLlama-3.1-8B", "/v1/models/meta-llama%2FLlama-3.1-8B"),
            ("GET", "/v1/models/meta-llama/Llama-3.1-8B", "/v1/models/meta-llama/Llama-3.1-8B"),
            ("GET", "/%761/models/%67pt-4.1?after=a%2Fb", "/v1/models/gpt-4.1?after=a%2Fb"),
            ("GET", "/v1/responses/resp_1/input_items?limit=3", "/v1/responses/resp_1/input_items?limit=3"),
            ("GET", "/v1/models?key=k&%6bey=k&a=1", "/v1/models?a=1"),
            ("GET", "/v1/v1/models/claude-sonnet-4-5", "/v1/models/claude-sonnet-4-5"),
            ("POST", "/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
            ("POST", "/v1beta/models/g-1:countTokens", "/v1beta/models/g-1:countTokens"),
            ("POST", "/v1beta/models/g-1:batchEmbedContents", "/v1beta/models/g-1:batchEmbedContents"),
            ("POST", "/v1beta/models/g-1:streamGenerateContent", "/v1beta/models/g-1:streamGenerateContent"),
        ):
            status, _ = await asyncio.to_thread(raw_answer, route.url, method, f"/r/desk{path}")
            assert status == 200, path
            assert provider.heads.pop().split()[1].decode() == forwarded
        assert (await route.state()).calls == 1  # of a model: the others list, read, embed and count tokens


async def test_headers_that_connection_names_end_at_this_server(passing: Opening) -> None:
    async with lied_to(passing) as (route, provider):
        provider.pieces = [OK + b"content-length: 2\r\n\r\n{}"]
        headers = {"connection": "close, X-Own ,authorization", "x-own": "1", "x-passed": "2", "proxy-connection": "x"}
        await asyncio.to_thread(raw_answer, route.url, "GET", "/r/desk/v1/models", headers)
        head = provider.heads[0].lower()
    assert b"x-passed: 2" in head and b"x-own" not in head and b"proxy-connection" not in head
    assert f"authorization: bearer {KEY}".encode() in head
