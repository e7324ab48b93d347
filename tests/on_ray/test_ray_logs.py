"""The log of an engine in a Ray actor, copied to a disk that may be full."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbook_ray.actor_process import ActorProcess
from offbook_ray.engine_actor import EngineNews, EnginePlace


class Answered:
    """What a method of a Ray actor returns."""

    def __init__(self, news: EngineNews) -> None:
        self._news = news

    def future(self) -> Future[EngineNews]:
        done: Future[EngineNews] = Future()
        done.set_result(self._news)
        return done


async def test_a_log_that_cannot_be_written_does_not_end_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    news = iter([EngineNews(b"loading"), EngineNews(b"ready"), EngineNews(b"", 0, "exit code 0")])
    actor: Any = SimpleNamespace(news=SimpleNamespace(remote=lambda _: Answered(next(news))))
    process = ActorProcess(actor, Path("/dev/full"), EnginePlace("localhost", 1, "node", ()))
    await process.exited.wait()
    assert (process.returncode, process.ending()) == (0, "exit code 0")
    assert "/dev/full cannot be written, 7 bytes of the log are lost: [Errno 28]" in caplog.text
