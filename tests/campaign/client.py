"""A client of the campaign, a process of its own: rollouts, train requests and state, each acknowledged in a journal.

    python -m tests.campaign.client --url URL --name agent-0 --journal FILE --seed 1

What the server answered is written to the journal as one line before the client goes on: a line of the journal is a promise
of the server. What is not answered is asked for again, with the same idempotency key or request id, until it is.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from offbook import Command, RemoteBackend, TrainableModel
from offbook.base.errors import ServerError
from offbook.base.server_sent_events import EventReader
from offbook.base.types import RolloutPlace
from offbook.client.connection.download import download_export
from offbook.client.connection.http import Api
from offbook.client.rollouts.records import rollout_records

from .calls import DOORS, Body, Wish, refusal
from .journal import Journal
from .server import shift_clock

ROLLOUTS = 2
"""At once."""
REST_SECONDS = 2.0
"""Between groups, and between writes of state."""
AGAIN_SECONDS = 0.7
PAUSE_SECONDS = 30.0
"""Between programs, and between downloads."""
PROGRAM_SECONDS = 600.0


class Refused(Exception):
    """An answer that sending again does not change."""


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
        base = (await self.sent("GET", "/health"))["base_model"]
        await self.sent("POST", "/api/models", {"name": self.name, "base_model": base})
        rollouts = (self.roll(at) for at in range(ROLLOUTS))
        await asyncio.gather(self.train(), self.keep_state(), self.run_programs(base), self.download(), *rollouts)

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
            await asyncio.sleep(REST_SECONDS)

    async def call(self, trajectory: str, turn: int) -> None:
        text = f"What is the weather in {self.random.choice(PLACES)}?"
        length, stream = self.random.choice((4, 24)), self.random.random() < 0.4
        door = self.random.choice(sorted(DOORS))
        wish = Wish(self.name, text, length, self.random.randrange(2**31), stream)
        headers = {"x-offbook-trajectory": trajectory, "idempotency-key": f"{trajectory}-{turn}"}
        answer = await self.sent("POST", DOORS[door].path(wish), DOORS[door].body(wish), headers, door)
        self.journal.add("call", trajectory=trajectory, door=door, **answer)

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
            await asyncio.sleep(REST_SECONDS)

    async def run_programs(self, base: str) -> None:
        """Programs as rollouts, by `Command` and by `offbook wrap`. One that failed is finished without a reward."""
        model = TrainableModel(self.name, base_model=base, backend=RemoteBackend(str(self.http.base_url)))
        while True:
            program = [sys.executable, "-m", "tests.campaign.program"]
            program += [str(self.journal.path), str(self.random.randrange(2**31))]
            try:
                if self.random.random() < 0.3:
                    await self.wrap(program)
                else:
                    await self.command(model, program)
            except ServerError as error:
                self.journal.add("unanswered", path="program", why=str(error)[:300])
            await asyncio.sleep(PAUSE_SECONDS)

    async def command(self, model: TrainableModel, program: list[str]) -> None:
        trajectory = await Command(program, timeout=PROGRAM_SECONDS)(model, {"prompt": "work"})
        api = await model.api()
        calls = await api.finish(rollout_records([trajectory], self.name, RolloutPlace()))
        told = {"reward": trajectory.reward, "calls": calls[trajectory.id]}
        failed = trajectory.exception.message[:200] if trajectory.exception else None
        self.journal.add("finished", id=trajectory.id, by="Command", failed=failed, **told)

    async def wrap(self, program: list[str]) -> None:
        words = [sys.executable, "-m", "offbook", "wrap", "--url", str(self.http.base_url), "--model", self.name, "--"]
        pipe = asyncio.subprocess.PIPE
        wrapped = await asyncio.create_subprocess_exec(*words, *program, stdout=pipe, stderr=pipe)
        _, told = await wrapped.communicate()
        line = re.search(r"recorded (\d+) calls? of \S+ in trajectory (\S+)", told.decode("utf-8", "replace"))
        if line is None:
            self.journal.add("unanswered", path="wrap", why=told[-300:].decode("utf-8", "replace"))
        elif int(line[1]):
            self.journal.add("finished", id=line[2], by="wrap", reward=None, calls=int(line[1]))

    async def download(self) -> None:
        """The newest LoRA, and the digest of its weights."""
        api = Api(str(self.http.base_url))
        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    step = (await api.model(self.name)).step
                    if not step:
                        continue
                    folder = await download_export(api, self.name, step, "peft", Path(scratch) / "lora")
                except ServerError as error:
                    self.journal.add("unanswered", path="download", why=str(error)[:300])
                    continue
                digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
                self.journal.add("downloaded", id=f"{self.name}@{step}", name=self.name, step=step, digest=digest)

    async def sent(
        self, method: str, path: str, body: Body | None = None, headers: Body | None = None, door: str = ""
    ) -> Body:
        """The answer, however often it takes. Raises Refused."""
        while True:
            try:
                answer = await self._once(method, path, body, headers or {}, door)
            except (httpx.TransportError, OSError, ValueError, KeyError) as error:
                self.journal.add("unanswered", path=path, why=repr(error))
                answer = None
            if answer is not None:
                return answer
            await asyncio.sleep(AGAIN_SECONDS * (1 + self.random.random()))

    async def _once(self, method: str, path: str, body: Body | None, headers: Body, door: str) -> Body | None:
        async with self.http.stream(method, path, json=body, headers=headers) as answer:
            if answer.status_code in (408, 429) or answer.status_code >= 500:
                text = (await answer.aread())[:300].decode(errors="replace")
                self.journal.add("unanswered", path=path, status=answer.status_code, why=text)
                return None
            if answer.status_code != 200:
                raise Refused(f"{method} {path}: {answer.status_code} {(await answer.aread())[:500]!r}")
            if not answer.headers["content-type"].startswith("text/event-stream"):
                whole = json.loads(await answer.aread())
                return DOORS[door].answered([whole]) if door else whole
            events = [event async for event in _events(answer)]
            if path == "/api/train":
                if events and events[-1]["kind"] == "result":
                    return events[-1]
            elif events and not refusal(events):
                return DOORS[door].answered(events)
            self.journal.add("unanswered", path=path, why=f"{events[-1:]}"[:300])
            return None


PLACES = ("Oslo", "Rome", "Lima", "Accra", "Hanoi", "Quito")


async def _events(answer: httpx.Response) -> AsyncIterator[Body]:
    reader = EventReader()
    async for piece in answer.aiter_bytes():
        for data in reader.push(piece):
            if data != b"[DONE]":
                yield json.loads(data)


async def run(options: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=options.url, timeout=120, trust_env=False) as http:
        await Client(http, options.name, Journal(options.journal), random.Random(options.seed)).work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--clock", type=Path, required=True)
    options = parser.parse_args()
    shift_clock(options.clock)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
