"""The endpoint of a model with a server's tools built in: what OpenAI's client sends and gets."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError
from starlette.types import ASGIApp

from offbook import TrainableModel
from offbook.testing import ScriptedServer
from offbook_mcp import Limits, ServerPool, Target
from offbook_mcp.commands.serve import ToolEndpoint, completion
from offbook_mcp.training.agent_loop import LoopOptions
from offbook_mcp.training.rewards import ToolEpisode
from tests.mcp_adapter.conftest import misbehaving
from tests.mcp_training.order_server import make_server, write_module

ASKED = [{"role": "user", "content": 'order_status(order="4000")'}]


@asynccontextmanager
async def endpoint(
    model: TrainableModel, key: str | None = None, target: Target | None = None
) -> AsyncGenerator[ASGIApp]:
    await model.register()
    async with ServerPool(target or Target.parse(make_server()), ahead=0) as pool:
        yield ToolEndpoint(pool, model, LoopOptions(temperature=0.0), 1_000, pool.toolset).application(key)


def client(app: ASGIApp, key: str = "none", host: str = "127.0.0.1") -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return AsyncOpenAI(base_url=f"http://{host}/v1", api_key=key, http_client=http, max_retries=0)


async def test_a_request_is_answered_after_the_calls_it_takes(stand_in: TrainableModel) -> None:
    async with endpoint(stand_in) as app:
        answer = await client(app).chat.completions.create(model="", messages=ASKED)  # type: ignore[arg-type]
    [choice] = answer.choices
    assert (choice.message.content or "").startswith("the tools said order 4000 is")
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    [called] = (answer.model_extra or {})["tool_calls"]
    assert (called["tool"], called["is_error"]) == ("order_status", False)


def test_an_answer_that_is_cut_off_says_so() -> None:
    loop: Any = SimpleNamespace(prompt_tokens=9, completion_tokens=96, records=())
    for cut_off, reason in ((True, "length"), (False, "stop")):
        answer: Any = completion("desk", ToolEpisode(answer="The order is", cut_off=cut_off), loop)
        assert answer["choices"][0]["finish_reason"] == reason


async def test_a_stream_has_the_same_answer(stand_in: TrainableModel) -> None:
    async with endpoint(stand_in) as app:
        stream = await client(app).chat.completions.create(model="", messages=ASKED, stream=True)  # type: ignore[call-overload]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text.startswith("the tools said order 4000 is")


async def test_the_model_is_listed(stand_in: TrainableModel) -> None:
    async with endpoint(stand_in) as app:
        assert [each.id for each in (await client(app).models.list()).data] == [stand_in.name]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "this model has its tools built in"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last one must be the user's"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"n": 2}, "n: Input should be 1"),
        ({"temperature": 9}, "temperature: "),
    ],
)
async def test_what_it_cannot_do_is_a_400_that_says_so(
    changed: dict[str, object], words: str, stand_in: TrainableModel
) -> None:
    async with endpoint(stand_in) as app:
        with pytest.raises(BadRequestError, match=words):
            await client(app).chat.completions.create(**({"model": "", "messages": ASKED} | changed))  # type: ignore[call-overload]


async def test_another_models_name_is_a_404(stand_in: TrainableModel) -> None:
    async with endpoint(stand_in) as app:
        for name in (stand_in.name, stand_in.inference_name()):
            await client(app).chat.completions.create(model=name, messages=ASKED)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError, match=r"there is no model 'gpt-4\.1' here, only 'tools-"):
            await client(app).chat.completions.create(model="gpt-4.1", messages=ASKED)  # type: ignore[arg-type]


async def test_a_server_that_fails_is_a_502_and_the_next_request_has_another(stand_in: TrainableModel) -> None:
    target = misbehaving("die", limits=Limits(start_seconds=20, call_seconds=5))
    async with endpoint(stand_in, target=target) as app:
        with pytest.raises(InternalServerError, match="the process ended") as told:
            await client(app).chat.completions.create(model="", messages=[{"role": "user", "content": "goad()"}])
        assert told.value.status_code == 502
        answer = await client(app).chat.completions.create(
            model="", messages=[{"role": "user", "content": 'echo(text="teal")'}]
        )
    assert answer.choices[0].message.content == "the tools said teal"


async def test_who_has_not_the_key_is_refused_and_without_a_key_other_hosts_are(stand_in: TrainableModel) -> None:
    async with endpoint(stand_in, key="secret") as app:
        assert [each.id for each in (await client(app, "secret").models.list()).data] == [stand_in.name]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example.com") as http:
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/v1/models", headers={"authorization": "Bearer other"})).status_code == 401
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
    async with endpoint(stand_in) as app:
        for host, status in (("evil.example", 403), ("localhost:8900", 200), ("[::1]:8900", 200)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
                assert (await http.get("/v1/models", headers={"host": host})).status_code == status


@pytest.mark.slow("starts the command")
def test_the_command_serves_until_it_is_interrupted(obedient: ScriptedServer, tmp_path: Path) -> None:
    write_module(tmp_path)
    words = ["mcp", "serve", "orders:server", "--port", "0", "--url", obedient.url]
    code = "from offbook_mcp.commands import app; import sys; app(sys.argv[2:])"
    command = [sys.executable, "-u", "-c", code, *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("orders with 2 tools at http://127.0.0.1:")
            assert "order 4000 is" in str(asyncio.run(answered(line.split()[-1])))
            process.send_signal(signal.SIGINT)
            process.wait(20)
        finally:
            process.kill()


async def answered(url: str) -> str | None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        answer = await openai.chat.completions.create(model="orders", messages=ASKED)  # type: ignore[arg-type]
    return answer.choices[0].message.content
