"""Calls that end early: cancelled, failed, out of memory, or refused by the probe."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from offbook.base.errors import EngineError
from offbook.engine.inference.decoding.batch import RunningBatch
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import Engine, call, prompt


def test_a_cancelled_call_frees_its_slot(policy: ModelRunner) -> None:
    engine = Engine(policy, max_batch=1)
    endless = call(policy, prompt(1, 10), max_tokens=500, streamed=True)
    engine.submit(endless)
    engine.wait_for_tokens(endless, 1)
    waiting = call(policy, prompt(2, 10), max_tokens=3)
    engine.submit(waiting)
    engine.scheduler.cancel([endless])
    (sampled,) = engine.wait(waiting)
    engine.scheduler.close()
    assert len(sampled.ids) == 3


def test_a_failed_pass_fails_its_calls_with_the_reason_and_the_engine_goes_on(
    engine: Engine, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("the lights went out")

    with monkeypatch.context() as patched:
        patched.setattr(policy, "decode", broken)
        sampled = engine.sample(*[call(policy, prompt(seed, 5)) for seed in range(3)])
    assert all(one.last.failure and "the lights went out" in one.last.failure.message for one in sampled)
    assert len(engine.sample(call(policy, prompt(1, 5)))[0].ids) == 12


def test_the_death_of_the_thread_is_told_and_fails_calls_also_later_ones(
    policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    engine = Engine(policy, on_death=told.set)

    def refuses(*_: object) -> RunningBatch:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("offbook.engine.inference.decoding.scheduler.RunningBatch", refuses)
    (sampled,) = engine.sample(call(policy, prompt(1, 5)))
    assert sampled.last.failure and "the device is gone" in sampled.last.failure.message
    assert told.wait(10)
    (late,) = engine.sample(call(policy, prompt(1, 5)))
    assert late.last.failure and "the engine has died: RuntimeError: the device is gone" in late.last.failure.message
    assert engine.scheduler.dead
    engine.scheduler.close()


def test_a_cancellation_that_fails_is_a_death_too(policy: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(policy)
    endless, other = (call(policy, prompt(seed, 10), max_tokens=500, streamed=True) for seed in (1, 2))
    engine.submit(endless, other)
    engine.wait_for_tokens(endless, 1)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room to move rows")

    monkeypatch.setattr(RunningBatch, "remove", full)
    engine.scheduler.cancel([other])
    failure = engine.wait(endless)[0].last.failure
    assert failure and "no room to move rows" in failure.message
    engine.scheduler.close()


def test_out_of_memory_names_the_options_to_lower(
    engine: Engine, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(policy, "prefill", full)
        (sampled,) = engine.sample(call(policy, prompt(1, 5)))
    failure = sampled.last.failure
    assert failure is not None
    assert failure.code == "out_of_memory"
    assert "--max-batch" in failure.message
    assert "--max-model-len" in failure.message


def test_logits_that_are_nan_fail_the_calls_and_leave_nothing_behind(
    engine: Engine, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = policy.decode
    with monkeypatch.context() as patched:
        patched.setattr(policy, "decode", lambda *given: decode(*given) * torch.nan)
        (sampled,) = engine.sample(call(policy, prompt(1, 5)))
    assert sampled.last.failure is not None
    assert "NaN" in sampled.last.failure.message
    assert all(math.isfinite(logprob) for logprob in engine.sample(call(policy, prompt(1, 5)))[0].logprobs)


def test_closing_fails_what_is_in_flight(policy: ModelRunner) -> None:
    engine = Engine(policy)
    endless = call(policy, prompt(1, 10), max_tokens=500, streamed=True)
    engine.submit(endless)
    engine.wait_for_tokens(endless, 1)
    engine.scheduler.close()
    assert engine.wait(endless)[0].last.failure is not None


def test_the_probe_refuses_a_model_that_ignores_the_mask(policy: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.probe() < 1e-4
    monkeypatch.setattr(policy, "_masks", lambda *_: None)
    with pytest.raises(EngineError, match="use --engine vllm"):
        policy.probe()
