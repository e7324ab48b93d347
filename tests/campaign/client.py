"""A client of the campaign, a process of its own: rollouts, train requests and state, each acknowledged in a journal.

    python -m tests.campaign.client --url URL --name agent-0 --journal FILE --seed 1

What the server answered is written to the journal as one line before the client goes on: a line of the journal is a promise
of the server. What is not answered is asked for again, with the same idempotency key or request id, until it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from offbook.base.server_sent_events import EventReader

ROLLOUTS = 3
"""At once."""
AGAIN_SECONDS = 0.1
Body = dict[str, Any]


class Refused(Exception):
    """An answer that sending again does not change."""


@dataclass
class Journal:
    """Lines of JSON, each one write to the end of a file: a killed process leaves whole lines."""

    path: Path
    file: int = -1

    def __post_init__(self) -> None:
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, kind: str, **fields: Any) -> None:
        os.write(self.file, (json.dumps({"kind": kind} | fields) + "\n").encode())


@dataclass
class Client:
    """`groups` holds finished rollouts that wait to be trained."""

    http: httpx.AsyncClient
    name: str
    journal: Journal
    random: random.Random
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    groups: asyncio.Queue[list[str]] = field(default_factory=lambda: asyncio.Queue(4))

    async def work(self) -> None:
        await self.sent(
            "POST", "/api/models", {"name": self.name, "base_model": (await self.sent("GET", "/health"))["base_model"]}
        )
        await asyncio.gather(self.train(), self.keep_state(), *(self.roll(at) for at in range(ROLLOUTS)))

    async def roll(self, place: int) -> None:
        number = 0
        while True:
            ids = [f"{self.name}-{self.run}-{place}-{number}-{side}" for side in "ab"]
            number += 1
            for reward, trajectory in enumerate(ids):
                for turn in range(self.random.randint(1, 3)):
                    await self.call(trajectory, turn)
                record = {"id": trajectory, "model": self.name, "reward": float(reward)}
                body = {"trajectories": [record | {"started_at": 1.0, "ended_at": 2.0}]}
                answer = await self.sent("POST", "/api/trajectories", body)
                self.journal.add("finished", id=trajectory, reward=float(reward), calls=answer["calls"][trajectory])
            await self.groups.put(ids)

    async def call(self, trajectory: str, turn: int) -> None:
        body: Body = {
            "model": self.name,
            "messages": [{"role": "user", "content": f"What is the weather in {self.random.choice(PLACES)}?"}],
            "max_tokens": self.random.choice((4, 24)),
            "temperature": 1.0,
            "seed": self.random.randrange(2**31),
            "return_token_ids": True,
            "stream": self.random.random() < 0.4,
        }
        headers = {"x-offbook-trajectory": trajectory, "idempotency-key": f"{trajectory}-{turn}"}
        answer = await self.sent("POST", "/v1/chat/completions", body, headers)
        self.journal.add("call", trajectory=trajectory, **answer)

    async def train(self) -> None:
        while True:
            ids = await self.groups.get()
            request = f"{self.name}-{uuid.uuid4().hex}"
            body = {"id": request, "model": self.name, "groups": [{"trajectory_ids": ids}]}
            for _ in range(
                2 if self.random.random() < 0.3 else 1
            ):  # sent again: the stored result, and nothing applied
                result = (await self.sent("POST", "/api/train", body))["result"]
                self.journal.add("trained", id=request, step=result["step"], applied=result["applied"])

    async def keep_state(self) -> None:
        path = f"/api/models/{self.name}/state"
        count = (await self.sent("GET", path))["value"].get("count", 0)
        while True:
            count += 1
            body = {"value": {"count": count, "padding": "x" * self.random.randrange(20_000)}}
            await self.sent("PUT", path, body)
            self.journal.add("state", name=self.name, count=count)
            await asyncio.sleep(0.2)

    async def sent(self, method: str, path: str, body: Body | None = None, headers: Body | None = None) -> Body:
        """The answer, however often it takes. Raises Refused."""
        while True:
            try:
                answer = await self._once(method, path, body, headers or {})
            except (httpx.TransportError, OSError, ValueError, KeyError) as error:
                self.journal.add("unanswered", path=path, why=repr(error))
                answer = None
            if answer is not None:
                return answer
            await asyncio.sleep(AGAIN_SECONDS * (1 + self.random.random()))

    async def _once(self, method: str, path: str, body: Body | None, headers: Body) -> Body | None:
        async with self.http.stream(method, path, json=body, headers=headers) as answer:
            if answer.status_code in (408, 429) or answer.status_code >= 500:
                text = (await answer.aread())[:300].decode(errors="replace")
                self.journal.add("unanswered", path=path, why=f"{answer.status_code} {text}")
                return None
            if answer.status_code != 200:
                raise Refused(f"{method} {path}: {answer.status_code} {(await answer.aread())[:500]!r}")
            streamed = answer.headers["content-type"].startswith("text/event-stream")
            if path == "/api/train":
                last = [event async for event in _events(answer)][-1:]
                if last and last[0]["kind"] == "result":
                    return last[0]
                self.journal.add("unanswered", path=path, why=f"{last}"[:300])
                return None
            if path == "/v1/chat/completions":
                return await _streamed_call(answer) if streamed else _whole_call(json.loads(await answer.aread()))
            return json.loads(await answer.aread())


PLACES = ("Oslo", "Rome", "Lima", "Accra", "Hanoi", "Quito")


async def _events(answer: httpx.Response) -> AsyncIterator[Body]:
    reader = EventReader()
    async for piece in answer.aiter_bytes():
        for data in reader.push(piece):
            if data != b"[DONE]":
                yield json.loads(data)


async def _streamed_call(answer: httpx.Response) -> Body | None:
    """A stream is acknowledged by its finishing chunk."""
    tokens: list[int] = []
    async for chunk in _events(answer):
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                return {"id": choice["offbook"]["call_id"], "tokens": tokens}
    return None


def _whole_call(body: Body) -> Body:
    (choice,) = body["choices"]
    return {"id": choice["offbook"]["call_id"], "tokens": choice["token_ids"]}


async def run(options: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=options.url, timeout=120, trust_env=False) as http:
        await Client(http, options.name, Journal(options.journal), random.Random(options.seed)).work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
