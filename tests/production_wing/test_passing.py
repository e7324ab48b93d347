"""The gateway before a paid model: what passes through, what is counted, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from sqlalchemy import Connection, Engine, event

from offbook.base.errors import ConfigError, StoreError
from offbook.base.types import RenderedHistory
from offbook.client.supervised_training import read_examples
from offbook.commands.main import run
from offbook.server.http.auth import Guard
from offbook.tracing.rollout_reader import conversations
from offbook_production.upstream import upstream_model
from tests.fakes.paid_api import ARGUMENTS

from .conftest import Opening

TOOL = {"name": "look_up", "description": "Finds a box.", "parameters": {"type": "object", "properties": {}}}
CLAUDE_TOOL = {"name": "look_up", "description": "Finds a box.", "input_schema": {"type": "object", "properties": {}}}
ASK = [{"role": "user", "content": "Where is box 4821?"}]
REQUESTS: dict[str, tuple[str, str, dict[str, Any], list[dict[str, Any]]]] = {
    "chat": (
        "openai/gpt-4.1",
        "/v1/chat/completions",
        {"model": "gpt-4.1", "messages": ASK, "stream_options": {"include_usage": True}},
        [{"type": "function", "function": TOOL}],
    ),
    "responses": (
        "openai/gpt-4.1",
        "/v1/responses",
        {"model": "gpt-4.1", "input": "Where is box 4821?"},
        [{"type": "function", **TOOL}],
    ),
    "messages": (
        "anthropic/claude-sonnet-4-5",
        "/v1/messages",
        {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": ASK},
        [CLAUDE_TOOL],
    ),
    "gemini": (
        "gemini/gemini-2.5-flash",
        "/v1beta/models/gemini-2.5-flash:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "Where is box 4821?"}]}]},
        [{"functionDeclarations": [TOOL]}],
    ),
}


@pytest.mark.parametrize("tool", [False, True], ids=["text", "tool"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", REQUESTS)
async def test_every_api_passes_byte_for_byte_and_is_recorded_as_a_chat(
    passing: Opening, api: str, streamed: bool, tool: bool
) -> None:
    model, path, body, tools = REQUESTS[api]
    body = body | ({"tools": tools} if tool else {}) | ({"stream": True} if streamed and api != "gemini" else {})
    if api == "chat" and not streamed:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    if streamed and api == "gemini":
        path = path.replace(":generateContent", ":streamGenerateContent") + "?alt=sse"
    async with passing(model=model) as route:
        raw = json.dumps(body, indent=3).encode()
        headers = {"content-type": "application/json", "x-offbook-thread": "t-1", "authorization": "Bearer sk-own"}
        answer = await route.http.post(path, content=raw, headers=headers)
        assert (answer.status_code, answer.content) == (200, route.paid.sent[0])
        assert answer.headers["x-request-id"] == "req_1"
        where, sent, arrived = route.paid.asked[0]
        assert (where, arrived) == (path, body) and sent["authorization"] == "Bearer sk-own"
        assert not [name for name in sent if name.startswith("x-offbook")]
        [thread] = await route.threads()
        state = await route.state()
    assert (state.prompt_tokens, state.cached_tokens, state.completion_tokens) == (30, 10, 7)
    assert state.cost > 0 and state.uncounted == state.unpriced == 0 and state.recorded == 1
    assert thread.record.metadata == {"thread_id": "t-1"} and thread.record.model == model
    [call] = thread.calls
    assert answer.headers["x-offbook-call"] == call.id and call.cost == pytest.approx(state.cost)
    [said] = [output.message for output in call.outputs]
    assert call.messages == ({"role": "user", "content": "Where is box 4821?"},)
    if tool:
        [asked] = said["tool_calls"]
        assert (asked["function"]["name"], json.loads(asked["function"]["arguments"])) == (
            "look_up",
            json.loads(ARGUMENTS),
        )
        assert call.tools is not None and call.tools[0]["function"]["name"] == "look_up"
    else:
        assert said == {"role": "assistant", "content": "It is on its way."}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_tokens_written_to_the_providers_cache_cost_what_the_provider_takes_for_them(
    passing: Opening, streamed: bool
) -> None:
    async with passing(model="anthropic/claude-sonnet-4-5") as route:
        split = {"ephemeral_5m_input_tokens": 100_000, "ephemeral_1h_input_tokens": 0}
        route.paid.usage = {
            "input_tokens": 0,
            "cache_creation_input_tokens": 100_000,
            "cache_read_input_tokens": 0,
            "cache_creation": split,
            "output_tokens": 100,
        }
        body = REQUESTS["messages"][2] | {"stream": streamed}
        assert (await route.http.post("/v1/messages", json=body)).status_code == 200
        state = await route.state()
        assert (state.cost, state.prompt_tokens) == (pytest.approx(0.3765), 100_000)
        [thread] = await route.threads()
        assert thread.calls[0].cost == pytest.approx(0.3765)


async def test_by_default_a_call_leaves_counts_and_no_text(passing: Opening, tmp_path: Path) -> None:
    async with passing(share=0.0) as route:
        answer = await route.chat("the password is swordfish-77", thread="customer-12345")
        assert "x-offbook-call" not in answer.headers
        state = await route.state()
        assert (state.calls, state.prompt_tokens, state.recorded, state.not_recorded) == (1, 30, 0, {})
        assert state.cost == pytest.approx((20 * 2.0 + 10 * 0.5 + 7 * 8.0) / 1e6)
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for text in (b"swordfish", b"on its way", b"customer-12345"):
        assert text not in kept
    assert b"route:desk" in kept


async def test_a_share_of_threads_is_recorded_whole_and_the_others_are_not_on_disk(
    passing: Opening, tmp_path: Path
) -> None:
    async with passing(share=0.3) as route:
        for turn in range(2):
            await asyncio.gather(*(route.chat(f"secret-{n:03}-{turn}", thread=f"user-{n:03}") for n in range(60)))
        threads = await route.threads()
        assert (await route.state()).calls == 120
    assert 8 <= len(threads) <= 30 and all(len(thread.calls) == 2 for thread in threads)
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    chosen = {str(thread.record.metadata["thread_id"]) for thread in threads}
    for number in range(60):
        on_disk = f"secret-{number:03}-0".encode() in kept
        assert on_disk == (f"user-{number:03}" in chosen)


async def test_secrets_and_personal_data_are_masked_before_they_are_stored(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        route.paid.text = "I wrote to ann@example.com."
        system = {"role": "system", "content": "Key: sk-abcdefghijklmnop1234"}
        user = {"role": "user", "content": "Pay with 4111 1111 1111 1111, order 4821"}
        used = {"id": "c", "type": "function", "function": {"name": "mail", "arguments": '{"to": "bob@example.com"}'}}
        answer = {"role": "assistant", "content": None, "tool_calls": [used]}
        await route.chat(messages=[system, user, answer, {"role": "tool", "tool_call_id": "c", "content": "ok"}])
        assert route.paid.asked[0][2]["messages"][1] == user  # the upstream gets it as it is
        [thread] = await route.threads()
    [call] = thread.calls
    assert [message["content"] for message in call.messages[:2]] == [
        "Key: [redacted key]",
        "Pay with [card], order 4821",
    ]
    assert call.outputs[0].message["content"] == "I wrote to [email]."
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for text in (b"ann@", b"bob@", b"4111", b"abcdefghijklmnop"):
        assert text not in kept


async def test_a_thread_without_a_name_is_one_call_and_metadata_names_one(passing: Opening) -> None:
    async with passing() as route:
        await route.chat()
        await route.chat()
        for _ in range(2):
            await route.chat(metadata={"thread_id": "t-9"})
        threads = await route.threads()
    assert sorted(len(thread.calls) for thread in threads) == [1, 1, 2]


async def test_records_that_cannot_be_written_lose_no_answer(passing: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    async with passing() as route:

        async def full(*_: object) -> None:
            raise StoreError("no space left")

        monkeypatch.setattr(route.services.store, "write", full)
        answers = await asyncio.gather(*(route.chat(thread=f"t-{number}") for number in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        state = await route.state()
        assert (state.calls, state.recorded, state.not_recorded) == (20, 0, {"StoreError": 20})


async def test_a_burst_is_recorded_in_few_transactions_and_a_row_that_is_refused_costs_no_other(
    passing: Opening, tmp_path: Path
) -> None:
    commits = list[Connection]()
    note = commits.append
    async with passing() as route:
        with sqlite3.connect(tmp_path / "records.db") as database:
            database.execute(
                "CREATE TRIGGER refusal BEFORE INSERT ON trajectories WHEN NEW.body LIKE '%poison%' "
                "BEGIN SELECT RAISE(ABORT, 'refused'); END"
            )
        event.listen(Engine, "commit", note)
        await asyncio.gather(*(route.chat(f"box {number}", thread=f"t-{number % 4}") for number in range(40)))
        before = await route.state()
        few = len(commits)
        await asyncio.gather(*(route.chat(text, thread=text) for text in ("a", "poison", "b")))
        after = await route.state()
        event.remove(Engine, "commit", note)
        threads = await route.threads()
    assert before.recorded == 40 and few < 20
    assert after.recorded == 42 and after.not_recorded == {"StoreError": 1}
    assert sorted(len(thread.calls) for thread in threads) == [1, 1, 10, 10, 10, 10]


async def test_a_database_that_hangs_delays_no_answer(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        answers = await asyncio.gather(*(route.chat(thread=f"t-{number}") for number in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert route.gateway.traffic.counts.recorded == 0
        other.execute("ROLLBACK")
        other.close()
        state = await route.state()
        assert state.recorded + sum(state.not_recorded.values()) == 20


async def test_what_the_upstream_refuses_arrives_as_it_said_it(passing: Opening) -> None:
    async with passing() as route:
        route.paid.status = 429
        answer = await route.chat(thread="t-1")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        state = await route.state()
        assert (state.calls, state.failed, state.not_recorded) == (1, 1, {"failed": 1})
        assert await route.threads() == []


async def test_a_stream_that_breaks_off_breaks_off_at_the_client(passing: Opening) -> None:
    async with passing() as route:
        route.paid.cut = True
        with pytest.raises(httpx.HTTPError):
            await route.chat(stream=True)
        assert (await route.state()).failed == 1


async def test_an_upstream_that_is_down_is_a_named_error_in_the_apps_own_api(passing: Opening) -> None:
    async with passing(model="anthropic/claude-sonnet-4-5?api_base=http://127.0.0.1:9") as route:
        body = {"model": "claude-sonnet-4-5", "max_tokens": 5, "messages": ASK}
        answer = await route.http.post("/v1/messages", json=body)
        assert answer.status_code == 502 and answer.json()["type"] == "error"
        assert answer.json()["error"]["message"].startswith("the upstream at 127.0.0.1 failed: ClientConnectorError")


async def test_a_client_that_leaves_ends_the_upstreams_call(passing: Opening) -> None:
    async with passing() as route:
        route.paid.wait = 30.0
        with pytest.raises(httpx.ReadTimeout):
            await route.http.post("/v1/chat/completions", json={"model": "gpt-4.1", "messages": ASK}, timeout=0.3)
        async with asyncio.timeout(10):
            while not route.gateway.traffic.counts.cancelled:
                await asyncio.sleep(0.01)


async def test_the_servers_key_stays_here_and_the_providers_key_goes_out(passing: Opening) -> None:
    environ = {"OPENAI_API_KEY": "sk-provider-key-1234567"}
    async with passing(guard=Guard("ob-server-key"), environ=environ) as route:
        assert (await route.chat()).status_code == 401
        answer = await route.http.post(
            "/v1/chat/completions",
            json={"model": "gpt-4.1", "messages": ASK},
            headers={"authorization": "Bearer ob-server-key", "cookie": "offbook_session=1"},
        )
        assert answer.status_code == 200
        [(_, headers, _)] = route.paid.asked
        assert headers["authorization"] == "Bearer sk-provider-key-1234567"
        assert "ob-server-key" not in json.dumps(headers) and "cookie" not in headers


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/v1/files", 404), ("DELETE", "/v1/models/x", 404), ("GET", "/v1/models", 200)],
)
async def test_only_what_an_app_asks_a_model_passes(passing: Opening, method: str, path: str, code: int) -> None:
    async with passing() as route:
        answer = await route.http.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == code
        assert len(route.paid.asked) == (code == 200)
        assert (await route.http.post(f"{route.url}/r/other/v1/chat/completions", json={})).status_code == 404


async def test_the_providers_own_clients_work_through_it(passing: Opening) -> None:
    async with passing() as route:
        client = openai.AsyncOpenAI(base_url=f"{route.url}/r/desk/v1", api_key="sk-own", max_retries=0)
        stream = await client.chat.completions.create(model="gpt-4.1", messages=ASK, stream=True)  # pyright: ignore
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == route.paid.text
        response = await client.responses.create(model="gpt-4.1", input="Where is box 4821?")
        assert response.output_text == route.paid.text
        await client.close()
    async with passing(model="anthropic/claude-sonnet-4-5") as route:
        claude = anthropic.AsyncAnthropic(base_url=f"{route.url}/r/desk", api_key="sk-ant")
        message = await claude.messages.create(model="claude-sonnet-4-5", max_tokens=9, messages=ASK)  # pyright: ignore
        assert message.content[0].text == route.paid.text  # pyright: ignore
        await claude.close()
    async with passing(model="gemini/gemini-2.5-flash") as route:
        options = genai.types.HttpOptions(base_url=f"{route.url}/r/desk")
        google = genai.Client(api_key="AIza-own", http_options=options)
        told = await google.aio.models.generate_content(model="gemini-2.5-flash", contents="Where is box 4821?")
        assert told.text == route.paid.text
        await google.aio.aclose()


async def test_old_and_large_threads_are_deleted(passing: Opening) -> None:
    async with passing(record_mb=0.004) as route:
        traffic = route.gateway.traffic
        for number in range(12):
            await route.chat(thread=f"t-{number}")
            await traffic.settled()
        assert len(await route.threads()) == 12
        assert await traffic.retain() > 0
        left = [str(thread.record.metadata["thread_id"]) for thread in await route.threads()]
        assert 0 < len(left) < 12 and left == [f"t-{number}" for number in range(11, 11 - len(left), -1)]


async def test_a_recorded_thread_is_a_conversation_to_train_on(passing: Opening) -> None:
    async with passing() as route:
        await route.chat(thread="t-1")
        again = [*ASK, {"role": "assistant", "content": "It is on its way."}, {"role": "user", "content": "When?"}]
        await route.chat(thread="t-1", messages=again)
        [thread] = await route.threads()
    [history] = conversations(thread)
    assert isinstance(history, RenderedHistory)
    assert [message["role"] for message in history.messages] == ["user", "assistant", "user", "assistant"]


async def test_the_commands_show_recorded_threads_and_write_them_for_sft(
    passing: Opening, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with passing() as route:
        await route.chat(thread="t-1")
        [thread] = await route.threads()
    where = ["--dir", str(tmp_path)]
    file = tmp_path / "good.jsonl"

    def commands() -> list[int]:
        write = ["traces", "conversations", "--run", "route/desk", "--output", str(file), *where]
        lines = [["show", "route/desk"], ["show", thread.record.id], write, write, [*write, "--min-reward", "1"]]
        return [run([*line, *(where if line[0] == "show" else [])]) for line in lines]

    assert await asyncio.to_thread(commands) == [0, 0, 0, 2, 2]
    assert "It is on its way." in capsys.readouterr().out
    [example] = read_examples(file, "default").examples
    [history] = example.record.histories
    assert [message["content"] for message in history.messages] == ["Where is box 4821?", "It is on its way."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-4.1", "PROVIDER/MODEL"),
        ("cohere/x", "PROVIDER/MODEL"),
        ("openai/x?api_base=ftp://h", "no http"),
        ("openai/x?key=1", "'key' is no option"),
        ("openai/x?prompt_price=1", "needed together"),
        ("openai/x?api_key_variable=NOPE", "'NOPE' is not set"),
    ],
)
def test_a_wrong_upstream_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upstream_model(text, {})
