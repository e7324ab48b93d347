"""No child is left behind, whatever happens, and nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from offbook_mcp import ServerPool, Target
from tests.mcp_adapter.conftest import SERVERS, children, misbehaving
from tests.mcp_adapter.servers import notes_server

HOLDING = """
import asyncio, signal, sys
from offbook_mcp import *

signal.signal(signal.SIGINT, signal.default_int_handler)  # the background jobs of a shell ignore it

async def main():
    server = StdioServer("odd", sys.executable, ("-I", "-S", sys.argv[1], "stubborn"))
    async with ServerPool(Target((server,)), ahead=2) as pool, pool.rollout(), pool.rollout():
        while len(pool._starting) < 2 or not all(task.done() for task in pool._starting):
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    """Whether all of them end in time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_servers_and_their_children_end_with_us_even_when_we_are_killed(number: signal.Signals) -> None:
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(SERVERS / "misbehaving.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with holding:
        assert holding.stdout is not None and holding.stdout.readline() == "ready\n"
        below = psutil.Process(holding.pid).children(recursive=True)
        assert len(below) == 9  # four servers that ignore SIGTERM, the child of each, and the process that watches
        holding.send_signal(number)
        try:
            holding.wait(30)
        finally:
            holding.kill()  # else a process that the signal did not end would be waited for without end
        assert gone(below)


async def test_a_server_that_ignores_everything_is_killed_with_its_children() -> None:
    async with ServerPool(misbehaving("stubborn")) as pool, pool.rollout() as tools:
        assert (await tools.call("echo", {"text": "a"})).text == "a"
        assert len(children()) >= 2
    assert children() == set()


async def test_rollouts_that_fail_or_are_cancelled_give_their_servers_back() -> None:
    async def failing(pool: ServerPool) -> None:
        async with pool.rollout() as tools:
            await tools.call("echo", {"text": "a"})
            raise ValueError("the app has failed")

    async with ServerPool(misbehaving("hang"), max_rollouts=2, ahead=0) as pool:
        failures = await asyncio.gather(*(failing(pool) for _ in range(5)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [ValueError] * 5
        hanging = [asyncio.create_task(called_in_rollout(pool, "goad")) for _ in range(4)]
        await asyncio.sleep(0.5)
        assert len(children()) <= 2
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert await called_in_rollout(pool, "echo") == "again"
    assert children() == set()


async def called_in_rollout(pool: ServerPool, tool: str) -> str:
    async with pool.rollout() as tools:
        return (await tools.call(tool, {"text": "again"})).text


async def test_a_pool_that_ends_ends_the_servers_of_rollouts_that_still_run() -> None:
    async with ServerPool(misbehaving("well"), max_rollouts=1) as pool:
        tools = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
    assert children() == set()
    pool.release(tools)
    with pytest.raises(RuntimeError, match="the pool is not open"):
        await waiting


async def many(pool: ServerPool, count: int, one: Callable[[int], object]) -> int:
    """Run rollouts, eight at a time; the growth of our memory in bytes after the first fifth."""
    slots = asyncio.Semaphore(8)
    process, before = psutil.Process(), 0

    async def rollout(number: int) -> None:
        nonlocal before
        async with slots, pool.rollout() as tools:
            for tool in pool.toolset.tools[:2]:
                await tools.call(tool.name, {"text": "a", "name": "a"})
        one(number)
        if number == count // 5:
            gc.collect()
            before = process.memory_info().rss

    await asyncio.gather(*(rollout(number) for number in range(count)))
    gc.collect()
    return process.memory_info().rss - before


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_many_rollouts_leave_no_process_no_file_and_no_growth() -> None:
    most = 0

    def watch(number: int) -> None:
        nonlocal most
        if number % 10 == 0:
            most = max(most, len(children()))

    async with ServerPool(misbehaving("well", stateless=False), max_rollouts=8, ahead=2) as pool:
        open_before = psutil.Process().num_fds()
        growth = await many(pool, 60, watch)
        most_open = psutil.Process().num_fds() - open_before
    assert children() == set()
    assert most <= 10
    assert most_open <= 10 * 6
    assert growth < 8e6


async def test_many_rollouts_in_process_leave_no_growth_and_no_task() -> None:
    before = len(asyncio.all_tasks())
    async with ServerPool(Target.parse(notes_server.server, stateless=False, only=("list_notes",))) as pool:
        growth = await many(pool, 200, lambda number: None)
    assert growth < 8e6
    assert len(asyncio.all_tasks()) == before


def test_a_loop_that_ends_early_takes_its_servers_along() -> None:
    async def forgotten() -> None:
        await ServerPool(misbehaving("stubborn")).__aenter__()

    asyncio.run(forgotten())
    deadline = time.monotonic() + 15
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() == set()


def watching_processes() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # has ended, and perhaps nobody has waited for it yet
            if any(word.endswith("reaper.py") for word in process.cmdline()):
                found.append(process)
    return found


async def test_the_watching_process_is_replaced_when_it_dies() -> None:
    async with ServerPool(misbehaving("well")) as pool:
        [watching] = watching_processes()
        os.kill(watching.pid, signal.SIGKILL)
        watching.wait(10)
        async with pool.rollout():
            pass
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if any(each.pid != watching.pid for each in watching_processes()):
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("nobody watches")
