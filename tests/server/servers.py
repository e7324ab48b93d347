"""Real servers for tests: started as a user starts them, on a free port, in a directory of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.fakes.scripted_sampler import scripted_sampler

READY_SECONDS = 400.0
"""Generous: two engine processes import torch on a machine that tests share."""


def until(met: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of `met`, asked often; fails naming `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := met():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@contextmanager
def without_engine() -> Iterator[tuple[str, ...]]:
    """Flags of a server whose sampler is scripted and in this process, and which has no learner: for tests of what is in front
    of an engine, whose two processes would take ten times as long to start as the server."""
    loop, end = asyncio.new_event_loop(), asyncio.Event()
    url = Future[str]()

    async def serve() -> None:
        async with scripted_sampler() as sampler:
            url.set_result(sampler.url)
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="scripted sampler")
    thread.start()
    try:
        yield ("--inference-only", "--vllm-url", url.result(timeout=30))
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def command(folder: Path, *flags: str, module: str = "offbook.server") -> list[str]:
    return [sys.executable, "-m", module, "--dir", str(folder), "--port", "0", "--threads", "1", *flags]


class RunningServer:
    """`python -m offbook.server` on the bundled policy. Leaving the context kills what is left of it."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        ready: bool = True,
        key: str | None = None,
        module: str = "offbook.server",
    ) -> None:
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command(folder, *flags, module=module), stdout=file, stderr=file)
        self.http = httpx.Client(timeout=120.0, trust_env=False)
        if key is not None:
            self.http.headers["authorization"] = f"Bearer {key}"
        if ready:
            try:
                self.wait_ready()
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.kill()

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_ready(self) -> None:
        until(self._ready, f"the server is ready; its output is in {self.log}", READY_SECONDS)
        self.http.base_url = httpx.URL(self.url)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        try:
            return self.http.get(self.url + "/health").json()["status"] == "ok"
        except (OSError, ValueError, KeyError, httpx.HTTPError):
            return False

    @property
    def url(self) -> str:
        return json.loads((self.folder / "server.json").read_text("utf-8"))["url"]

    # ---- processes

    def child(self, word: str) -> psutil.Process:
        """The engine process whose command line has `word`: inference or learner."""

        def found() -> psutil.Process | None:
            for process in psutil.Process(self.process.pid).children():
                if any(word in part for part in process.cmdline()):
                    return process
            return None

        return until(found, f"a child {word!r}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """kill -9 of the server alone; its children must follow by themselves."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    # ---- requests

    def chat(self, text: str = "Hello", trajectory: str | None = None, **body: Any) -> httpx.Response:
        headers = {"x-offbook-trajectory": trajectory} if trajectory else {}
        return self.http.post("/v1/chat/completions", json=chat_body(text, **body), headers=headers)

    def rollouts(self, count: int, name: str, rewards: Sequence[float] | None = None, **body: Any) -> list[str]:
        """Finished trajectories of one call each; rewards alternate unless given."""
        ids = [f"{name}-{index}" for index in range(count)]
        for index, trajectory in enumerate(ids):
            answer = self.chat("What is the weather in Oslo?", trajectory, seed=index, temperature=1.0, **body)
            assert answer.status_code == 200, answer.text
        scores = rewards if rewards is not None else [float(index % 2) for index in range(count)]
        self.finish([record(trajectory, score) for trajectory, score in zip(ids, scores, strict=True)])
        return ids

    def finish(self, records: Sequence[dict[str, Any]]) -> httpx.Response:
        answer = self.http.post("/api/trajectories", json={"trajectories": list(records)})
        assert answer.status_code == 200, answer.text
        return answer

    def train(self, request_id: str, groups: Sequence[Sequence[str]], **config: Any) -> list[dict[str, Any]]:
        """The events of a train request, to its end."""
        return list(events(self.http, train_body(request_id, groups, **config)))


def events(client: httpx.Client, body: dict[str, Any]) -> Any:
    """Each event of a train request as it comes."""
    with client.stream("POST", "/api/train", json=body, timeout=300.0) as answer:
        if answer.status_code != 200:
            answer.read()
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def chat_body(text: str = "Hello", **body: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | body


def train_body(
    request_id: str, groups: Sequence[Sequence[str]], model: str = "default", **config: Any
) -> dict[str, Any]:
    records = [{"trajectory_ids": list(group)} for group in groups]
    return {"id": request_id, "model": model, "groups": records, "config": {"learning_rate": 1e-3} | config}


def record(trajectory: str, reward: float | None, **fields: Any) -> dict[str, Any]:
    return {"id": trajectory, "model": "default", "reward": reward, "started_at": 1.0, "ended_at": 2.0} | fields
