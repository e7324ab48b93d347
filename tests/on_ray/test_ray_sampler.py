"""Replicas in actors of a real Ray cluster of this machine: scripted vLLMs, killed under load and replaced."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from offbook import tiny
from offbook.base.errors import EngineError
from offbook.server.sampler.engine_choice import REMOTE_WORDS
from offbook.server.sampler.pool import SamplerPool
from offbook_ray.actor_process import RayPlacement
from offbook_ray.engine_actor import RemoteEngine, fingerprint
from offbook_ray.ray_sampler import RaySampler
from tests.on_ray.local_cluster import ray_cluster
from tests.server.sampler.test_replicas import MODULE, call, count_of, notes, streamed, until

pytestmark = pytest.mark.slow("real Ray")


@pytest.fixture(scope="module", autouse=True)
def cluster(require: Callable[[bool, str], None]) -> Iterator[Any]:
    """Ray on this machine, small."""
    require(find_spec("ray") is not None, "pip install -r requirements/test.txt")
    with ray_cluster(3) as ray:
        yield ray


def replica(folder: Path, number: int, *words: str, base: Path | None = None, **wants: Any) -> RaySampler:
    def engine() -> RemoteEngine:
        words_ = (*REMOTE_WORDS, "--notes", str(folder / f"notes-{number}"), *words)
        return RemoteEngine(MODULE, str(base or tiny.path()), fingerprint(tiny.path()), words_, {})

    placement = RayPlacement("auto", **wants)
    return RaySampler(engine, placement, folder / f"sampler-{number}.log", name=f"replica {number} of the sampler")


@asynccontextmanager
async def replicas(folder: Path) -> AsyncIterator[SamplerPool]:
    pool = SamplerPool([replica(folder, number) for number in range(2)])
    pool.start()
    try:
        await pool.started()
        yield pool
    finally:
        await pool.stop()


def adapter(folder: Path, step: int) -> Path:
    """A checkpoint: an adapter's files, and others that no engine needs."""
    path = folder / "checkpoints" / f"{step:04d}"
    path.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        (path / name).write_bytes(f"{name} of {step}".encode())
    return path


def engines(folder: Path) -> list[psutil.Process]:
    """The starters of the scripted vLLMs of a test, and then those, wherever they run."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        found += [process] if MODULE in words and any(str(folder) in word for word in words) else []
    return sorted(found, key=lambda process: "--parent-pid" not in process.cmdline())


def engine_of(folder: Path, number: int) -> psutil.Process:
    """The starter of a replica."""
    return next(one for one in engines(folder) if any(f"notes-{number}" in word for word in one.cmdline()))


async def test_of_two_actors_one_is_killed_under_load_and_only_its_begun_streams_fail_and_its_adapters_are_back(
    tmp_path: Path,
) -> None:
    first, second = adapter(tmp_path, 1), adapter(tmp_path, 2)
    async with replicas(tmp_path) as pool:
        await pool.adapters.load("agent@1", first)
        victim, other = engine_of(tmp_path, 0), engine_of(tmp_path, 1)
        begun: set[int] = set()
        streams = [asyncio.create_task(streamed(pool, n, begun)) for n in range(100, 124)]
        whole = [asyncio.create_task(pool.calls.post(call(n), trajectory=f"t{n}")) for n in range(24)]
        await until(lambda: len(begun) == len(streams) and count_of(tmp_path, "call") == len(streams) + len(whole))
        lost, kept = (count_of(tmp_path, "call t1", " stream", of=number) for number in range(2))
        actor = victim.parent()
        assert actor is not None and actor.pid != os.getpid()
        os.kill(actor.pid, signal.SIGKILL)
        await asyncio.to_thread(victim.wait, 10)  # the engine ends with its actor
        await pool.adapters.load("agent@2", second)  # while replica 0 is down
        (tmp_path / "go").touch()
        assert {reply.status for reply in await asyncio.gather(*whole)} == {200}
        endings = Counter(await asyncio.gather(*streams))
        assert endings.pop("whole") == kept and sum(endings.values()) == lost and lost + kept == 24
        assert all(text.startswith("replica 0 of the sampler ended (its Ray actor is gone: ") for text in endings)
        for member in pool.members:
            await member.ready()
        assert [member.restarts for member in pool.members] == [1, 0]
        assert engine_of(tmp_path, 0).pid != victim.pid and engine_of(tmp_path, 1).pid == other.pid
        loads = [note for note in notes(tmp_path, 0) if "load_lora" in note]
        assert loads == ["/v1/load_lora_adapter agent@1"] * 2 + ["/v1/load_lora_adapter agent@2"]
        retried = [await pool.calls.post(call(n, model="agent@2"), trajectory=f"t{n}") for n in range(100, 124)]
        assert {reply.status for reply in retried} == {200}
        assert all(count_of(tmp_path, "call", "agent@2", of=number) for number in range(2))
    await until(lambda: not engines(tmp_path))


async def test_a_replica_loads_a_copy_on_its_own_disk_which_is_removed_with_the_adapter(tmp_path: Path) -> None:
    checkpoint = adapter(tmp_path, 1)
    async with replicas(tmp_path) as pool:
        await pool.adapters.load("agent@1", checkpoint)
        copies = [member._copies["agent@1"] for member in pool.members if isinstance(member, RaySampler)]
        assert len(set(copies)) == 2 and str(checkpoint) not in copies
        sent = "lora ['adapter_config.json', 'adapter_model.safetensors']"
        assert [count_of(tmp_path, sent, of=number) for number in range(2)] == [1, 1]
        assert (Path(copies[0]) / "adapter_model.safetensors").read_text() == "adapter_model.safetensors of 1"
        await pool.adapters.unload("agent@1")
        assert not any(Path(copy).exists() for copy in copies)
        with pytest.raises(EngineError, match=r"The adapter agent@9 could not be read: .*No such file"):
            await pool.adapters.load("agent@9", tmp_path / "missing")
        await pool.adapters.load("agent@2", adapter(tmp_path, 2))
        shutil.rmtree(tmp_path / "checkpoints" / "0002")
        engine_of(tmp_path, 0).kill()  # the engine alone: its actor is replaced with it
        await until(lambda: pool.members[0].restarts == 1)
        await pool.members[0].ready()
        assert "agent@2" not in pool.members[0].adapters.loaded  # its checkpoint is gone; the replica is back
    log = (tmp_path / "sampler-0.log").read_text()
    assert log.count("listens") == 2  # its output is copied here


async def test_an_engine_takes_no_call_without_its_key(tmp_path: Path) -> None:
    async with replicas(tmp_path) as pool:
        child = pool.members[0]._child  # type: ignore[attr-defined]
        async with httpx.AsyncClient(base_url=child.place.url, trust_env=False) as client:
            assert (await client.post("/v1/chat/completions", json=call(1))).status_code == 401
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("words", "base", "message"),
    [
        (("fails",), None, r"\(the process ended with exit code 1\).*the card is on fire"),
        ((), "other", r"on the Ray cluster: .* is not the base of the server: its files differ"),
        ((), "missing", r"on the Ray cluster: .*there is no such folder"),
    ],
)
async def test_a_replica_that_cannot_start_fails_the_start_with_the_reason(
    tmp_path: Path, words: tuple[str, ...], base: str | None, message: str
) -> None:
    if base == "other":
        shutil.copytree(tiny.path(), tmp_path / "other")
        (tmp_path / "other" / "config.json").write_text("{}")
    sampler = replica(tmp_path, 0, *words, base=None if base is None else tmp_path / base)
    sampler.start()
    try:
        with pytest.raises(EngineError, match=f"(?s)Replica 0 of the sampler could not be started.*{message}"):
            await sampler.started()
    finally:
        await sampler.stop()
    await until(lambda: not engines(tmp_path))


async def test_a_cluster_without_room_is_told_while_the_replica_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook_ray.actor_process.WAIT_NOTICE", 0.5)
    sampler = replica(tmp_path, 0, gpus=2)
    sampler.start()
    try:
        await until(lambda: "it needs a machine with 1 free CPU and 2 free GPU" in caplog.text)
        assert sampler.state == "starting" and sampler.detail is not None
    finally:
        await sampler.stop()


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.on_ray.test_ray_sampler import replica

async def main():
    sampler = replica(Path(sys.argv[1]), 0)
    sampler.start()
    await sampler.ready()
    print(sampler._child.place.url, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_an_engine_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    async with asyncio.timeout(120):
        url = (await server.stdout.readline()).decode().strip()
    family = engines(tmp_path)
    assert len(family) == 2
    assert url.startswith("http://")
    server.kill()
    await server.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 30)
    assert not alive
