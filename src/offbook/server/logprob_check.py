"""Checks once, before any training, that the sampler's logprobs are the learner's, on these engines and this device."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import orjson
from numpy.typing import NDArray

from offbook.base.errors import EngineError, OffbookError

from ..engine.protocol import CompletionScored, Failed, ScoreCommand
from .calls.chat_request import ChatRequest
from .calls.sampled_answer import Sampled, SampledChoice, json_object, understood
from .services import Services
from .training.learner_client import LearnerClient

logger = logging.getLogger(__name__)

FACT = "logprobs"
"""The learner's fact that has the result."""
TOKENS = 32
TEMPERATURE = 2.0
"""Far from 1, so that an engine that reports logprobs before temperature is off by more than rounding, also in 16 bits."""
SECONDS = 300.0
"""Time limit of the whole comparison."""
PROMPT = "Say hello, then count to ten."
BOUNDS = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
"""Largest mean absolute difference of a token's logprob that rounding explains, in nats, by the learner's dtype. A wrong
temperature, template or weight is off by more. A base in 4 bits gets the bound of bfloat16 four times: its rounding is the
quantization's. Measured on a CPU with the bundled policies: 1e-6 in float32, 0.03 at most in bfloat16; the others are estimates."""


@dataclass(frozen=True)
class Agreement:
    """Of `tokens` sampled tokens: mean and largest absolute difference between sampler and learner, and the bound of the
    mean, all in nats."""

    tokens: int
    mean: float
    largest: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the mean difference is at most the bound."""
        return self.mean <= self.bound

    def __str__(self) -> str:
        text = f"sampler and learner differ by {self.mean:.1e} nats on average, {self.largest:.1e} at most ({self.tokens} tokens)"
        return f"ok, {text}" if self.ok else f"wrong: {text}; rounding explains {self.bound:g} on average"


async def check_logprobs(services: Services) -> Agreement | None:
    """Sample a short call that is not recorded, and compare its logprobs with the learner's. The result becomes a fact of
    the learner, and a line in the log. None without a learner on its device, or if it failed; then the log says why."""
    learner = services.learner
    if learner is None:
        return None
    try:
        await learner.started()
        if learner.state != "ready":
            raise EngineError("the learner did not start")
        async with asyncio.timeout(SECONDS):
            agreement = await _compare(services, learner)
    except (OffbookError, TimeoutError) as error:
        error = error if str(error) else EngineError(f"no answer within {SECONDS:g} s")
        logger.warning("The logprobs of sampler and learner were not compared: %s", error)
        learner.note(FACT, f"not compared: {error}")
        return None
    _report(learner, agreement)
    return agreement


async def _compare(services: Services, learner: LearnerClient) -> Agreement:
    async with services.models.leases.lease(services.base.name) as route:
        choice, command = await _sample(services, route.adapter)
    async with services.engine.free_gpu(services.sampler.calls):
        computed = await _score(learner, command)
    logprobs = np.asarray(choice.logprobs, np.float64)
    difference = np.abs(logprobs - computed)[np.isfinite(logprobs)]
    return Agreement(len(difference), float(difference.mean()), float(difference.max()), _bound(learner.facts))


def _report(learner: LearnerClient, agreement: Agreement) -> None:
    learner.note(FACT, str(agreement))
    if agreement.ok:
        logger.info("Logprobs before training: %s", agreement)
    else:
        logger.warning(
            "Logprobs before training are %s. Steps would learn from the difference. docs/troubleshooting.md, `Nothing was learned`, "
            "says what to do",
            agreement,
        )


def _bound(facts: dict[str, str]) -> float:
    dtype, _, rest = facts.get("dtype", "float32").partition(",")
    return 4 * BOUNDS["bfloat16"] if rest else BOUNDS.get(dtype, BOUNDS["bfloat16"])


async def _sample(services: Services, adapter: str) -> tuple[SampledChoice, ScoreCommand]:
    """A sampled answer, and the command that computes its logprobs. Raises EngineError, ApiError."""
    body = {
        "model": services.base.name,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS,
        "temperature": TEMPERATURE,
        "ignore_eos": True,
    }
    chat = ChatRequest.parse(orjson.dumps(body), {}, None, services.engine.quirks)
    recorded = replace(chat, trajectory_id="logprob-check")  # the request of a recorded call; nothing is recorded
    sampled = Sampled(recorded.limits)
    reply = await services.sampler.calls.post(recorded.payload(adapter), recorded.limits.bytes)
    if reply.status != 200:
        raise EngineError(f"the sampler answered {reply.status}: {reply.content[:300]!r}")
    understood(sampled.add_answer, json_object(reply.content))
    sampled.check()
    choice = sampled.choices[0]
    if not choice.token_ids:
        raise EngineError("the sampler answered no token")
    if not np.isfinite(choice.logprobs).any():
        raise EngineError("the sampler gives no logprobs")
    prompt, completion = tuple(sampled.prompt_ids or ()), tuple(choice.token_ids)
    return choice, ScoreCommand(
        request_id=uuid.uuid4().hex, prompt_ids=prompt, completion_ids=completion, temperature=TEMPERATURE
    )


async def _score(learner: LearnerClient, command: ScoreCommand) -> NDArray[np.float64]:
    async with aclosing(learner.run(command)) as events:
        async for event in events:
            if isinstance(event, CompletionScored):
                return np.asarray(event.logprobs)
            if isinstance(event, Failed):
                raise EngineError(event.message)
    raise EngineError("the learner ended without an answer; its log says why")
