"""vLLM samples, Unsloth trains, on this machine's CPU: what is recorded, swapped and survived, and what OpenAI's own client
gets, as of the embedded engine (tests/server/test_openai_sdk.py)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError
from transformers import AutoTokenizer

import offbook
from offbook.base.errors import EngineError
from offbook.base.types import CallStatus
from offbook.engine.protocol import FLAT_LOGPROBS
from offbook.server.sampler.supervised import SupervisedSampler
from offbook.server.sampler.transport import SERVED_NAME
from offbook.tiny import path as tiny_policy
from tests.server.servers import RunningServer, until

pytestmark = pytest.mark.slow("real vLLM")

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Find an order",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
        },
    }
]
OTHER: Any = {"type": "function", "function": TOOLS[0]["function"] | {"name": "cancel_order"}}
QUESTION: list[Any] = [{"role": "user", "content": "Where is order 17?"}]


async def model_at(backend: offbook.RemoteBackend, name: str) -> offbook.TrainableModel:
    model = offbook.TrainableModel(name=name, base_model="tiny", backend=backend)
    await model.register()
    return model


async def rollout(model: offbook.TrainableModel, number: int, reward: float) -> offbook.Trajectory:
    messages: list[Any] = [{"role": "user", "content": f"Tell me what you know of {number}."}]
    trajectory = offbook.Trajectory(messages_and_choices=messages, reward=reward)
    answer = await model.openai_client().chat.completions.create(
        model=model.name, messages=messages, max_tokens=24, temperature=1.5
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    return trajectory


async def trained(model: offbook.TrainableModel) -> offbook.TrainResult:
    """One step on two groups of four, with rewards that differ inside each."""
    groups = await offbook.gather_trajectory_groups(
        offbook.TrajectoryGroup(rollout(model, number, float(place)) for place in range(4)) for number in (1, 2)
    )
    return await model.train(groups, config=offbook.TrainConfig(learning_rate=5e-3))


async def likeliest(model: offbook.TrainableModel, name: str) -> list[float]:
    """Logprobs of a greedy answer."""
    client = model.openai_client()
    messages: list[Any] = [{"role": "user", "content": "Tell me what you know of 5."}]
    answer = await client.chat.completions.create(
        model=name, messages=messages, max_tokens=16, temperature=0, logprobs=True
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content
    return [each.logprob for each in found.content]


async def test_a_call_is_recorded_with_the_ids_and_logprobs_that_vllm_sampled(backend: offbook.RemoteBackend) -> None:
    model = await model_at(backend, "recorded")
    answer = await model.openai_client().chat.completions.create(
        model=model.name,
        messages=QUESTION,
        tools=TOOLS,
        max_tokens=48,
        n=2,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    fields: dict[str, Any] = answer.model_dump()
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy())
    rendered = tokenizer.apply_chat_template(QUESTION, tools=TOOLS, add_generation_prompt=True, return_dict=True)
    assert fields["prompt_token_ids"] == rendered["input_ids"]
    call = await call_of(model, fields["choices"][0])
    assert list(call.prompt_ids) == fields["prompt_token_ids"] and len(call.outputs) == 2
    for choice, output in zip(fields["choices"], call.outputs, strict=True):
        assert list(output.token_ids) == choice["token_ids"]
        assert list(output.logprobs) == [each["logprob"] for each in choice["logprobs"]["content"]]
        assert [call["function"]["name"] for call in output.message["tool_calls"]] == ["find_order"]


def test_our_plugin_is_loaded_in_vllms_web_server_and_in_its_engine(server: RunningServer) -> None:
    log = (server.folder / "logs" / "sampler.log").read_text(encoding="utf-8")
    assert (
        len(
            set(
                re.findall(
                    r"plugin renders messages, bounds the blanks of JSON, and computes the logprobs of sampled tokens, in process (\d+)",
                    log,
                )
            )
        )
        == 2
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_our_plugin_gives_flat_logprobs_equal_to_vllms_own_where_a_call_asks(
    server: RunningServer, stream: bool
) -> None:
    transport = httpx.AsyncHTTPTransport(uds=sampler_socket(server))
    body = {"model": SERVED_NAME, "messages": QUESTION, "max_tokens": 24, "temperature": 0, "stream": stream}
    body |= {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
    found: list[list[float]] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=120) as client:
        for more in ({}, {"vllm_xargs": {FLAT_LOGPROBS: 1}}, {"vllm_xargs": {FLAT_LOGPROBS: 1}, "top_logprobs": 1}):
            text = (await client.post("/v1/chat/completions", json=body | more)).raise_for_status().text
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
            flat = "vllm_xargs" in more and "top_logprobs" not in more
            assert all(bool(each.get("token_logprobs")) is flat is not bool(each["content"]) for each in logprobs)
            found.append(
                [value for each in logprobs for value in each["token_logprobs"]]
                if flat
                else [item["logprob"] for each in logprobs for item in each["content"]]
            )
    assert len(found[0]) == 24 and found[0] == found[1] == found[2]


async def test_a_stream_is_recorded_with_every_token_also_those_that_its_chunks_do_not_show(
    backend: offbook.RemoteBackend,
) -> None:
    model = await model_at(backend, "streamed")
    chunks: list[dict[str, Any]] = []
    stream = await model.openai_client().chat.completions.create(
        model=model.name,
        messages=QUESTION,
        tools=TOOLS,
        max_tokens=48,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    async for chunk in stream:
        chunks.append(chunk.model_dump())
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    call = await call_of(model, choices[-1])
    (output,) = call.outputs
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == list(output.token_ids)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy())
    text = tokenizer.decode(output.token_ids)
    (tool_call,) = output.message["tool_calls"]
    assert text.count("<tool_call>") == 1 and json.loads(tool_call["function"]["arguments"]) == {"order": "17"}
    assert not any(map(math.isnan, output.logprobs)) and output.status is CallStatus.COMPLETE


def sampler_socket(server: RunningServer) -> str:
    """Where the server's own vLLM listens."""
    commands = [each.cmdline() for each in psutil.Process(server.process.pid).children()]
    return next(words[words.index("--uds") + 1] for words in commands if "--uds" in words)


async def call_of(model: offbook.TrainableModel, choice: dict[str, Any]) -> Any:
    """The recorded call of a marked choice."""
    mark = choice["offbook"]
    found = await (await model.api()).trajectory(mark["trajectory_id"])
    return next(call for call in found.calls if call.id == mark["call_id"])


async def test_a_step_of_unsloth_is_swapped_in_and_sampler_and_learner_agree(
    server: RunningServer, backend: offbook.RemoteBackend
) -> None:
    model = await model_at(backend, "swapped")
    before = await likeliest(model, model.name)
    first = await trained(model)
    assert first.applied and first.step == 1
    after = await likeliest(model, model.name)
    assert max(abs(old - new) for old, new in zip(before, after, strict=False)) > 1e-2
    assert await likeliest(model, f"{model.name}@0") == before  # the base, beside it
    second = await trained(model)
    assert second.step == 2 and second.metrics["calls/stale_share"] == 0
    assert 0 < second.metrics["kl/sampler_learner_max_diff"] < 1e-3  # vLLM with the LoRA, and the learner at step 1
    assert "loader unsloth" in (server.folder / "logs" / "learner.log").read_text("utf-8")


class Connected(SupervisedSampler):
    """The server's own client, on the socket of its vLLM."""

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self._connect("http://sampler", socket=socket)
        self._state = "ok"


async def test_vllm_sleeps_when_its_calls_have_ended_and_those_that_came_are_answered_when_it_wakes(
    server: RunningServer, backend: offbook.RemoteBackend
) -> None:
    """On a CPU vLLM's sleep frees nothing; the order of calls, sleep and waking is that of a shared GPU."""
    words = psutil.Process(engine_of(server)).cmdline()
    sampler = Connected(Path(words[words.index("--uds") + 1]))
    call = {"model": "base", "messages": QUESTION, "max_tokens": 64, "ignore_eos": True}
    early = [asyncio.create_task(sampler.calls.post(call)) for _ in range(4)]
    await asyncio.sleep(0)
    async with sampler.calls.asleep():
        assert all(task.done() for task in early)
        late = asyncio.create_task(sampler.calls.post(call))
        sleeping = await sampler.connection.control.get("/is_sleeping")  # type: ignore[union-attr]
        assert sleeping.json() == {"is_sleeping": True}
        assert not late.done()
    assert [(await each).status for each in (*early, late)] == [200] * 5
    await sampler.stop()


async def test_vllm_pauses_and_is_told_to_release_its_cache_which_only_a_gpu_can(
    server: RunningServer, backend: offbook.RemoteBackend
) -> None:
    """The request arrives in vLLM's worker, which has nothing to release on a CPU; then it answers calls again."""
    words = psutil.Process(engine_of(server)).cmdline()
    sampler = Connected(Path(words[words.index("--uds") + 1]))
    call = {"model": "base", "messages": QUESTION, "max_tokens": 8}
    with pytest.raises(EngineError, match="The sampler refused /release_kv_cache_memory"):
        async with sampler.calls.asleep(keep_weights=True):
            raise AssertionError("the learner would run out of memory here")
    log = (server.folder / "logs" / "sampler.log").read_text("utf-8")
    assert "Selective discard is not supported on CPU" in log
    assert (await sampler.calls.post(call)).status == 200
    awake = await sampler.connection.control.get("/is_sleeping")  # type: ignore[union-attr]
    assert awake.json() == {"is_sleeping": False}
    await sampler.stop()


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_base_is_called_by_its_own_name(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert answer.model == "tiny" and answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [9_000, 1_000_000])
async def test_a_prompt_that_is_too_long_has_openais_code(client: AsyncOpenAI, words: int, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "box " * words}]
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=messages, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_of_the_allowed_tools_one_is_called(client: AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "cancel_order"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    answer = await client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[*TOOLS, OTHER], tool_choice=choice, max_tokens=64, n=4
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert {call.function.name for call in calls if call.type == "function"} == {"cancel_order"}


async def test_16_stop_strings_end_an_answer(client: AsyncOpenAI) -> None:
    stops = [f"never {number}" for number in range(15)]
    whole = await client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content or ""
    end = text[len(text) // 2 :][:3]
    answer = await client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, stop=[*stops, end])
    assert text and answer.choices[0].message.content == text[: text.index(end)]
    with pytest.raises(BadRequestError, match="16"):
        await client.chat.completions.create(model="tiny", messages=QUESTION, stop=[*stops, "a", "b"])


async def test_vllm_killed_under_32_calls_comes_back_with_the_newest_lora_and_nothing_recorded_is_lost(
    server: RunningServer, backend: offbook.RemoteBackend
) -> None:
    model = await model_at(backend, "survivor")
    assert (await trained(model)).step == 1
    expected = await likeliest(model, model.name)
    kept = await rollout(model, 3, 1.0)
    calls = [asyncio.create_task(long_call(model)) for _ in range(32)]
    await asyncio.to_thread(until, lambda: in_flight(server) >= 32, "32 calls are in the engine")
    victim = engine_of(server)
    os.kill(victim, signal.SIGKILL)
    ends = await asyncio.gather(*calls)
    assert set(ends) <= {"length", "stop", "502", "503"} and ends.count("length") + ends.count("stop") >= 16, ends
    assert await likeliest(model, model.name) == expected  # the restarted vLLM has loaded the LoRA again
    choice = kept.messages_and_choices[-1]
    call = await call_of(model, choice.model_dump())  # type: ignore[union-attr]
    assert call.step == 1 and call.outputs[0].status is not CallStatus.FAILED
    assert engine_of(server) != victim and not psutil.pid_exists(victim)


async def long_call(model: offbook.TrainableModel) -> str:
    """How a call of many tokens ended: its finish reason, or the status of its error."""
    try:
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=QUESTION, max_tokens=600, extra_body={"ignore_eos": True}
        )
    except APIStatusError as error:
        assert "the sampler ended" in error.message, error.message
        return str(error.status_code)
    return str(answer.choices[0].finish_reason)


def engine_of(server: RunningServer) -> int:
    """The process id of vLLM's server."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child.pid for child in children if "vllm.entrypoints" in " ".join(child.cmdline()))


def in_flight(server: RunningServer) -> int:
    return server.http.get("/health").json()["in_flight"]
