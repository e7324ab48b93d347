"""Before any training, logprobs of the sampler are compared with the learner's: of a real learner here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from offbook.base.server_options import EngineOptions
from offbook.commands.doctor import server_checks
from offbook.engine.protocol import CompletionScored, ScoreCommand
from offbook.server import logprob_check
from offbook.server.base_model import find
from offbook.server.logprob_check import FACT, TEMPERATURE, Agreement, check_logprobs
from offbook.server.sampler.gpu_sharing import GpuSharing
from offbook.server.services import Services
from offbook.server.training.learner_client import LearnerClient
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion
from tests.server.servers import RunningServer, until

PROMPT, COMPLETION = (1, 2, 3), (11, 12, 13)


@pytest.fixture
async def learner(tmp_path: Path) -> AsyncIterator[LearnerClient]:
    client = LearnerClient(find("tiny"), EngineOptions(threads=1), tmp_path / "logs" / "learner.log")
    client.start()
    try:
        await client.started()
        yield client
    finally:
        await client.stop()


def answering(gateway: Gateway, logprobs: tuple[float | None, ...], omit: str = "") -> None:
    """Script the sampler's next answer."""
    choice = ScriptedChoice(pieces=("text",), token_ids=(COMPLETION,), logprobs=(logprobs,))
    omitted = frozenset({omit} if omit else ())
    gateway.sampler.completions.append(ScriptedCompletion(choices=(choice,), prompt_ids=PROMPT, omit=omitted))


async def scored(learner: LearnerClient) -> tuple[float, ...]:
    """The learner's logprobs of COMPLETION."""
    command = ScoreCommand(request_id="own", prompt_ids=PROMPT, completion_ids=COMPLETION, temperature=TEMPERATURE)
    [own] = [event.logprobs async for event in learner.run(command) if isinstance(event, CompletionScored)]
    return own


async def test_a_sampler_with_other_logprobs_is_told_with_what_was_measured(
    gateway: Gateway, learner: LearnerClient, caplog: pytest.LogCaptureFixture
) -> None:
    services = replace(gateway.services, learner=learner)
    own = await scored(learner)
    assert all(value < 0 for value in own)

    answering(gateway, own)
    agreement = await check_logprobs(services)
    assert agreement is not None and agreement.ok and agreement.tokens == 3 and agreement.largest < 1e-6
    assert learner.facts[FACT].startswith("ok, sampler and learner differ by ")
    [sent] = gateway.sampler.received
    assert (sent["temperature"], sent["logprobs"], sent["return_token_ids"]) == (TEMPERATURE, True, True)
    assert sent["model"] == "base"

    answering(gateway, (own[0] - 0.25, own[1] - 0.5, None))
    with caplog.at_level(logging.WARNING):
        agreement = await check_logprobs(services)
    assert agreement is not None and not agreement.ok and agreement.tokens == 2
    assert agreement.mean == pytest.approx(0.375) and agreement.largest == pytest.approx(0.5)
    assert learner.facts[FACT].startswith(
        "wrong: sampler and learner differ by 3.8e-01 nats on average, 5.0e-01 at most"
    )
    assert "Steps would learn from the difference" in caplog.text

    answering(gateway, own, omit="logprobs")
    assert await check_logprobs(services) is None
    assert learner.facts[FACT] == "not compared: the sampler gives no logprobs"

    gateway.sampler.completions.append(
        ScriptedCompletion(choices=(ScriptedChoice(pieces=("",), token_ids=((),), logprobs=((),)),))
    )
    assert await check_logprobs(services) is None
    assert learner.facts[FACT] == "not compared: the sampler answered no token"

    answering(gateway, own, omit="token_ids")
    assert await check_logprobs(services) is None
    assert learner.facts[FACT].startswith("not compared: ") and "token_ids" in learner.facts[FACT]


class Absent(LearnerClient):
    """A learner that may not be asked: it is in host memory."""

    def __init__(self) -> None:
        super().__init__(find("tiny"), EngineOptions(), Path("learner.log"))


@pytest.mark.slow("a learner")
async def test_a_learner_in_host_memory_computes_while_the_sampler_sleeps(
    gateway: Gateway, learner: LearnerClient
) -> None:
    engine = replace(gateway.services.engine, name="vllm", sharing=GpuSharing("offload"))
    services: Services = replace(gateway.services, learner=learner, engine=engine)
    answering(gateway, await scored(learner))
    agreement = await check_logprobs(services)
    assert agreement is not None and agreement.ok
    assert gateway.sampler.control_paths == ["/sleep", "/wake_up"] and len(gateway.sampler.received) == 1


def test_the_bound_is_of_the_mean() -> None:
    assert Agreement(8, 1e-3, 0.5, 1e-3).ok and not Agreement(8, 2e-3, 2e-3, 1e-3).ok
    assert not Agreement(8, math.nan, math.nan, 1e-3).ok


@pytest.mark.slow("a server with a learner")
def test_a_server_says_in_health_and_doctor_how_far_sampler_and_learner_differ(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "dir") as server:
        fact = until(lambda: server.http.get("/health").json()["learner"].get(FACT), "the comparison", 120)
        assert fact.startswith("ok, ") and fact.endswith("(32 tokens)")
        assert server.http.get("/api/trajectories").json()["trajectories"] == []
        lines = {check.name: check for check in server_checks(tmp_path / "dir")}
        assert (lines["logprobs"].status, lines["logprobs"].found) == ("ok", fact)
        server.interrupt()
        server.process.wait(60)


async def test_a_sampler_that_hangs_leaves_calls_alone_and_is_named_after_the_time_limit(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_check, "SECONDS", 3.0)
    learner = Absent()
    learner.state = "ready"  # the sampler hangs before anything is asked of it
    services = replace(gateway.services, learner=learner)
    gateway.sampler.completions.append(ScriptedCompletion(gates={0: asyncio.Event()}))
    check = asyncio.create_task(check_logprobs(services))
    await gateway.sampler.arrived.acquire()
    assert (await gateway.chat()).status_code == 200 and not check.done()
    assert await check is None
    assert learner.facts[FACT] == "not compared: no answer within 3 s"


async def test_a_learner_that_did_not_start_is_named(gateway: Gateway) -> None:
    learner = Absent()
    assert await check_logprobs(replace(gateway.services, learner=learner)) is None
    assert learner.facts[FACT] == "not compared: the learner did not start"
