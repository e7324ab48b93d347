"""vLLM servers that run already, several as one, and the sleep of a shared GPU: against scripted ones on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import EngineError
from offbook.server.sampler import running_sampler
from offbook.server.sampler.pool import SamplerPool
from offbook.server.sampler.running_sampler import RunningSampler
from offbook.server.sampler.supervised import SupervisedSampler
from offbook.server.sampler.transport import SERVED_NAME
from tests.fakes.scripted_sampler import ScriptedCompletion, ScriptedSampler, scripted_sampler

CALL: dict[str, Any] = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def running(
    count: int = 1, **script: Any
) -> AsyncIterator[tuple[list[ScriptedSampler], SupervisedSampler | SamplerPool]]:
    """`count` scripted samplers, and the client that the server would have of them, started."""
    async with AsyncExitStack() as stack:
        scripted = [await stack.enter_async_context(scripted_sampler()) for _ in range(count)]
        for each in scripted:
            vars(each).update(script)
        members = [RunningSampler(each.url) for each in scripted]
        client = members[0] if count == 1 else SamplerPool(members)
        client.start()
        try:
            yield scripted, client
        finally:
            await client.stop()


async def test_its_own_name_for_the_base_is_used_and_an_adapter_keeps_ours() -> None:
    async with running(name="Qwen/Qwen2.5-7B-Instruct") as ((scripted,), client):
        await client.ready()
        await client.adapters.load("desk@1", Path("/lora"))
        for name in (SERVED_NAME, "desk@1"):
            assert (await client.calls.post(CALL | {"model": name})).status == 200
        assert [each["model"] for each in scripted.received] == ["Qwen/Qwen2.5-7B-Instruct", "desk@1"]
        assert scripted.adapters == {"desk@1": "/lora"}


async def test_one_that_gives_the_logprobs_of_raw_logits_is_refused_with_the_option_that_it_needs() -> None:
    async with running(raw_logprobs=True) as ((scripted,), client):
        with pytest.raises(
            EngineError, match=f"vLLM at {scripted.url} cannot be used: .*--logprobs-mode processed_logp"
        ):
            await client.ready()


async def test_one_without_our_plugin_is_used_with_a_warning_that_messages_may_lose_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as ((scripted,), client):
        await client.ready()
        assert f"vLLM at {scripted.url} runs without Offbook's plugin" in caplog.text
        assert "OFFBOOK_VLLM_PLUGIN=1" in caplog.text


async def test_one_whose_answers_have_another_shape_is_refused_by_it() -> None:
    async with running(omit_logprobs=True) as (_, client):
        with pytest.raises(EngineError, match=r"not of vLLM's dialect \(TypeError.*"):
            await client.ready()


async def test_one_that_does_not_answer_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_sampler, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(running_sampler, "POLL_SECONDS", 0.01)
    async with running(healthy=False) as ((scripted,), client):
        with pytest.raises(EngineError, match=f"vLLM at {scripted.url} did not answer GET /health"):
            await client.ready()


async def test_calls_wait_for_one_that_is_gone_and_its_adapters_are_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_sampler, "POLL_SECONDS", 0.01)
    async with running() as ((scripted,), client):
        await client.ready()
        await client.adapters.load("desk@1", Path("/lora"))
        scripted.healthy = False
        async with asyncio.timeout(20):
            while client.state == "ok":
                await asyncio.sleep(0.01)
        scripted.adapters.clear()
        call = asyncio.create_task(client.calls.post(CALL))
        scripted.healthy = True
        assert (await call).status == 200
        assert scripted.adapters == {"desk@1": "/lora"} and client.restarts == 1


async def test_several_share_the_calls_and_each_has_every_adapter() -> None:
    async with running(2) as (scripted, client):
        await asyncio.gather(*(member.ready() for member in client.members))  # type: ignore[union-attr]
        await client.adapters.load("desk@1", Path("/lora"))
        assert [each.adapters for each in scripted] == [{"desk@1": "/lora"}] * 2
        gate = asyncio.Event()
        for each in scripted:
            each.completions.extend(ScriptedCompletion(gates={0: gate}) for _ in range(8))
        calls = [asyncio.create_task(client.calls.post(CALL)) for _ in range(8)]
        async with asyncio.timeout(20):
            while sum(len(each.received) for each in scripted) < 8:
                await asyncio.sleep(0.01)
        assert client.calls.in_flight == 8
        assert sorted(len(each.received) for each in scripted) in ([3, 5], [4, 4])
        gate.set()
        assert [(await call).status for call in calls] == [200] * 8
        await client.adapters.unload("desk@1")
        assert [each.adapters for each in scripted] == [{}, {}]


async def test_a_call_goes_to_another_when_its_own_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_sampler, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(running_sampler, "POLL_SECONDS", 0.01)
    async with running(2) as (scripted, client):
        await asyncio.gather(*(member.ready() for member in client.members))  # type: ignore[union-attr]
        scripted[0].healthy = False
        scripted[0].completions.append(ScriptedCompletion(dies_after=0))
        assert (await client.calls.post(CALL)).status == 200
        assert [len(each.received) for each in scripted] == [1, 1]
        assert client.state == "ok"


async def test_asleep_waits_for_calls_in_flight_and_holds_those_that_arrive() -> None:
    async with running() as ((scripted,), client):
        gate, learning = asyncio.Event(), asyncio.Event()
        scripted.completions.append(ScriptedCompletion(gates={0: gate}))
        first = asyncio.create_task(client.calls.post(CALL))
        await scripted.arrived.acquire()

        async def learn() -> list[str]:
            async with client.calls.asleep():
                learning.set()
                await asyncio.sleep(0)
                return [*scripted.control_paths, f"{len(scripted.received)} calls"]

        step = asyncio.create_task(learn())
        second = asyncio.create_task(client.calls.post(CALL))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not learning.is_set() and scripted.control_paths == []
        gate.set()
        assert await step == ["/sleep", "1 calls"]
        assert [(await call).status for call in (first, second)] == [200, 200]
        assert scripted.control_paths == ["/sleep", "/wake_up"] and len(scripted.received) == 2


async def test_of_two_that_need_the_gpu_the_second_waits_until_the_first_has_left_it() -> None:
    async with running() as ((scripted,), client):
        async with asyncio.TaskGroup() as tasks, client.calls.asleep():
            second = tasks.create_task(_slept(client))
            await asyncio.sleep(0.05)
            assert scripted.control_paths == ["/sleep"] and not second.done()
        assert scripted.control_paths == ["/sleep", "/wake_up"] * 2


async def _slept(client: SupervisedSampler | SamplerPool) -> None:
    async with client.calls.asleep():
        await asyncio.sleep(0)


async def test_with_its_weights_kept_the_scheduler_is_paused_and_the_cache_released_until_the_block_ends() -> None:
    async with running() as ((scripted,), client):
        async with client.calls.asleep(keep_weights=True):
            assert scripted.control_paths == ["/sleep", "/release_kv_cache_memory"] and scripted.sleep_queries == [
                "level=0&mode=wait"
            ]
            late = asyncio.create_task(client.calls.post(CALL))
            for _ in range(100):
                await asyncio.sleep(0)
            assert scripted.received == []
        assert (await late).status == 200 and scripted.control_paths[2:] == ["/wake_up"]
        async with client.calls.asleep():
            assert scripted.control_paths[3:] == ["/sleep"] and scripted.sleep_queries[1:] == ["level=1&mode=wait"]


async def test_a_cache_that_is_not_released_fails_the_step_and_calls_are_answered_again() -> None:
    async with running(keeps_cache=True) as ((scripted,), client):
        with pytest.raises(EngineError, match=r"refused /release_kv_cache_memory: .*not supported on CPU"):
            async with client.calls.asleep(keep_weights=True):
                raise AssertionError("the learner would run out of memory here")
        assert scripted.control_paths == ["/sleep", "/release_kv_cache_memory", "/wake_up"]
        assert (await client.calls.post(CALL)).status == 200


async def test_asleep_of_several_puts_each_to_sleep_and_wakes_each() -> None:
    async with running(2) as (scripted, client):
        await asyncio.gather(*(member.ready() for member in client.members))  # type: ignore[union-attr]
        async with client.calls.asleep():
            assert [each.control_paths for each in scripted] == [["/sleep"]] * 2
        assert [each.control_paths for each in scripted] == [["/sleep", "/wake_up"]] * 2
        async with client.calls.asleep(keep_weights=True):
            assert [each.control_paths[2:] for each in scripted] == [["/sleep", "/release_kv_cache_memory"]] * 2
