"""The sampler child: where it listens."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from servers import READY_SECONDS

from understudy import tiny
from understudy.config import EngineOptions
from understudy.server.child import Child
from understudy.server.sampler import SamplerClient


async def test_nobody_can_take_the_samplers_port_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals = Child.start, list[int | None]()

    async def raced(argv: Sequence[str], log: Path, *, inherited: Sequence[int] = ()) -> Child:
        (fd,) = inherited
        with socket.socket(fileno=os.dup(fd)) as listener, socket.socket() as thief:
            with pytest.raises(OSError) as refused:
                thief.bind(listener.getsockname())
            refusals.append(refused.value.errno)
        return await start(argv, log, inherited=inherited)

    monkeypatch.setattr(Child, "start", raced)
    options = EngineOptions.model_validate({"threads": 1})
    sampler = SamplerClient(tiny.path(), options, tmp_path / "sampler.log")
    sampler.start()
    try:
        async with asyncio.timeout(READY_SECONDS):
            await sampler.ready()
        message = {"role": "user", "content": "hi"}
        answer = await sampler.post({"model": "base", "messages": [message], "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        await sampler.stop()
    assert refusals == [errno.EADDRINUSE]
