"""Replicas of one server: scripted vLLMs as real processes, watched and started again one by one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbook.base.errors import EngineError
from offbook.server.sampler.child_sampler import ChildSampler
from offbook.server.sampler.pool import SamplerPool

MODULE = "tests.server.sampler.scripted_replica"
SECONDS = 60.0


def child(folder: Path, number: int, *words: str) -> ChildSampler:
    def command(socket: Path) -> list[str]:
        return [sys.executable, "-m", MODULE, str(socket), str(folder / f"notes-{number}"), *words]

    return ChildSampler(command, folder / f"sampler-{number}.log", name=f"replica {number} of the sampler")


@asynccontextmanager
async def replicas(folder: Path, count: int = 2) -> AsyncIterator[SamplerPool]:
    pool = SamplerPool([child(folder, number) for number in range(count)])
    pool.start()
    try:
        await pool.started()
        yield pool
    finally:
        await pool.stop()


def notes(folder: Path, number: int) -> list[str]:
    path = folder / f"notes-{number}"
    return path.read_text().splitlines() if path.exists() else []


def call(number: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"scenario {number}"}
    return {"model": "base", "messages": [message], "max_tokens": 8, "user": f"t{number}"} | fields


@pytest.mark.parametrize("after", ["", "nanobind: leaked 3 functions!\n - leaked function\n"])
async def test_why_one_refuses_to_start_is_its_last_error_whatever_its_libraries_write_after_it(
    tmp_path: Path, after: str
) -> None:
    log = f"loading\n2026-11-28 10:00:00,000 ERROR offbook.sampler: --model x: cut off\n{after}"
    code = f"import sys; sys.stderr.write({log!r}); sys.exit(2)"
    sampler = ChildSampler(lambda socket: [sys.executable, "-c", code], tmp_path / "sampler.log")
    sampler.start()
    with pytest.raises(EngineError, match=r"^The sampler could not be started: --model x: cut off \(log: "):
        await sampler.started()
    await sampler.stop()


async def streamed(pool: SamplerPool, number: int, begun: set[int]) -> str:
    """How a stream ended: whole, or with which error. Its number is in `begun` once it has."""
    try:
        async with pool.calls.stream(call(number, stream=True), f"t{number}") as response:
            begun.add(number)
            body = await response.read()
    except EngineError as error:
        return str(error)
    return "whole" if body.rstrip().endswith(b"[DONE]") else "cut"


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_killed_replica_is_started_again_alone_with_its_adapters_and_only_its_streams_break(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as pool:
        await pool.adapters.load("agent@1", Path("/checkpoints/1"))
        first, other = (children_of(number)[0] for number in range(2))
        begun: set[int] = set()
        streams = [asyncio.create_task(streamed(pool, n, begun)) for n in range(100, 124)]
        whole = [asyncio.create_task(pool.calls.post(call(n), trajectory=f"t{n}")) for n in range(24)]
        await until(lambda: len(begun) == len(streams) and count_of(tmp_path, "call") == len(streams) + len(whole))
        lost, kept = (count_of(tmp_path, "call t1", " stream", of=number) for number in range(2))
        os.kill(first, signal.SIGKILL)
        await pool.adapters.load("agent@2", Path("/checkpoints/2"))  # while replica 0 is down
        (tmp_path / "go").touch()
        assert {reply.status for reply in await asyncio.gather(*whole)} == {200}
        reason = (
            f"replica 0 of the sampler ended (signal 9 (SIGKILL)) during the call. Its log: {tmp_path}/sampler-0.log"
        )
        assert Counter(await asyncio.gather(*streams)) == {"whole": kept, reason: lost} and lost + kept == 24
        for member in pool.members:
            await member.ready()
        assert [member.restarts for member in pool.members] == [1, 0]
        assert children_of(0)[0] != first and children_of(1) == [other]
        loads = [note for note in notes(tmp_path, 0) if "load_lora" in note]
        assert loads == ["/v1/load_lora_adapter agent@1"] * 2 + ["/v1/load_lora_adapter agent@2"]
        assert [note for note in notes(tmp_path, 1) if "load_lora" in note] == loads[1:]
        retried = [await pool.calls.post(call(n, model="agent@2"), trajectory=f"t{n}") for n in range(100, 124)]
        assert {reply.status for reply in retried} == {200}
        assert all(count_of(tmp_path, "call", "agent@2", of=number) for number in range(2))


def count_of(folder: Path, *parts: str, of: int | None = None) -> int:
    """The number of notes with these parts, of one replica or of all."""
    numbers = range(3) if of is None else [of]
    return sum(all(part in note for part in parts) for number in numbers for note in notes(folder, number))


def children_of(number: int) -> list[int]:
    """The process ids of a replica of this test's process."""
    found: list[int] = []
    for process in psutil.Process().children():
        if MODULE in (words := process.cmdline()) and words[-1].endswith(f"notes-{number}"):
            found.append(process.pid)
    return found


async def test_replicas_that_share_the_gpu_sleep_and_wake_together_and_one_that_died_asleep_answers_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "go").touch()
    async with replicas(tmp_path, 3) as pool:
        pool.members[2].shares_gpu = False
        async with pool.calls.asleep():
            asleep = [
                [note for note in notes(tmp_path, number) if note[1:6] in ("sleep", "wake_")] for number in range(3)
            ]
            assert asleep == [["/sleep"], ["/sleep"], []]
            async with asyncio.timeout(SECONDS):  # by the one that is awake
                answers = [await pool.calls.post(call(n), trajectory=f"t{n}") for n in range(8)]
            assert {reply.status for reply in answers} == {200} and count_of(tmp_path, "call", of=2) == 8
            os.kill(children_of(0)[0], signal.SIGKILL)
        assert [notes(tmp_path, number).count("/wake_up") for number in (1, 2)] == [1, 0]
        await pool.members[0].ready()
        answers = await asyncio.gather(*(pool.calls.post(call(n), trajectory=f"u{n}") for n in range(16)))
        assert {reply.status for reply in answers} == {200} and count_of(tmp_path, "call", of=0) > 0


async def test_a_replica_that_never_comes_up_fails_the_start_by_its_name_while_others_load(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    loading = ChildSampler(lambda socket: ["sleep", "600"], tmp_path / "sampler-0.log")
    pool = SamplerPool([loading, child(tmp_path, 1, "fails")])
    pool.start()
    try:
        with pytest.raises(EngineError) as told:
            await pool.started()
    finally:
        await pool.stop()
    assert str(told.value).startswith(
        "Replica 1 of the sampler could not be started (the process ended with exit code 1)"
    )
    assert str(told.value).endswith("sampler-1.log:\nthe card is on fire")
    assert set(psutil.Process().children()) <= before
