"""The server killed with signal 9 in the middle of a takeover: its evidence goes on, and no call of a user is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.testing.asgi import serving
from offbook_production.wire import TakeoverState
from tests.fakes.paid_api import PaidApi
from tests.fakes.scripted_sampler import scripted_sampler
from tests.server.servers import RunningServer

SMALL, PAID = "Hello", "It is on its way."
RULE = {"share": 0.5, "threads": 20, "margin": 0.4}
AT_ONCE = 8


class App:
    """An app that asks the first address, and the provider itself when that does not answer."""

    def __init__(self, http: httpx.AsyncClient, url: str, provider: str) -> None:
        self.http, self.url = http, url
        self.addresses = (f"{url}/r/desk", provider)

    async def said(self, thread: str) -> str:
        body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "Where is box 4821?"}]}
        for address in self.addresses:
            try:
                headers = {"x-offbook-thread": thread}
                answer = await self.http.post(f"{address}/v1/chat/completions", json=body, headers=headers)
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                return answer.json()["choices"][0]["message"]["content"]
        raise AssertionError(f"the call of {thread} is lost")

    async def score(self, thread: str) -> None:
        body = {"thread_id": thread, "score": 1.0}
        (await self.http.post(f"{self.url}/api/feedback", json=body)).raise_for_status()

    async def state(self, action: str = "", **rule: Any) -> TakeoverState:
        path = f"{self.url}/api/takeover{action}"
        answer = await (self.http.post(path, json=rule) if action else self.http.get(path))
        assert answer.status_code == 200, answer.text
        return TakeoverState.model_validate_json(answer.content)

    async def reach(self, scored: int) -> dict[str, str]:
        """Let threads ask and be scored until the small model has so many scores; returns thread -> answer."""
        answers: dict[str, str] = {}
        for number in range(600):
            thread = f"t-{number}"
            answers[thread] = await self.said(thread)
            await self.score(thread)
            if (await self.state()).numbers.small >= scored:
                return answers
        raise AssertionError(f"too few scores: {await self.state()}")


@asynccontextmanager
async def served(folder: Path, provider: str, *flags: str) -> AsyncIterator[tuple[RunningServer, App]]:
    server = await asyncio.to_thread(RunningServer, folder, "--inference-only", *flags)
    try:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            yield server, App(http, server.url, provider)
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@pytest.mark.slow("kills of real servers")
async def test_a_kill_in_the_middle_of_a_takeover_loses_no_call_no_score_and_no_decision(tmp_path: Path) -> None:
    async with serving(PaidApi()) as provider, scripted_sampler() as sampler:
        upstream = f"openai/gpt-4.1?api_base={provider}/v1"
        flags = ("--vllm-url", sampler.url, "--upstream", upstream, "--route", "desk")
        async with served(tmp_path / "dir", provider, *flags) as (server, app):
            await app.state("/start", **RULE)
            answers = await app.reach(scored=3)
            before = await app.state()
            asked = iter(range(200))

            async def ask() -> list[str]:
                return [await app.said(f"busy-{number}") for number in asked]

            async def kill() -> None:
                while next(asked) < 60:  # in the middle of the others' calls
                    await asyncio.sleep(0.01)
                server.kill()

            said, _ = await asyncio.gather(asyncio.gather(*(ask() for _ in range(AT_ONCE))), kill())
            late = [text for texts in said for text in texts]
            assert {SMALL, PAID} == set(late) and late[-1] == PAID  # the provider's own after the kill
        async with served(tmp_path / "dir", provider, *flags) as (_, app):
            after = await app.state()
            assert after.decisions == before.decisions and after.share == 0.5
            assert after.numbers.model_copy(update={"calls": before.numbers.calls}) == before.numbers
            for thread, answer in answers.items():
                assert await app.said(thread) == answer
