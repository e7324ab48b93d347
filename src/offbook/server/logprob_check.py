"""Checks once, before any training, that the sampler's logprobs are the learner's, on these engines and this device: of the
base, and of a random adapter. A sampler that ignores adapters would answer as the base for ever."""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from offbook.base.errors import EngineError, OffbookError

from ..engine.protocol import CompletionScored, Failed, ScoreCommand
from .calls.chat_request import ChatRequest
from .calls.sampled_answer import Sampled, json_object, understood
from .services import Services
from .training.learner_client import LearnerClient

logger = logging.getLogger(__name__)

FACT = "logprobs"
ADAPTER_FACT = "adapter"
"""The learner's facts that have the results: of the base, and of the random adapter."""
ADAPTER = "logprob-check"
"""The random adapter's name in the sampler. Those of steps have an @."""
FOLDER = "logprob-check.part"
"""The random adapter's folder in the server's directory, during the check."""
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


@dataclass(frozen=True)
class Movement:
    """What a random adapter does, in mean absolute differences of a token's logprob, in nats. `learner`: the learner's with
    it, from its own without. `apart`, `from_base`: the sampler's with it, from the learner's with and without. `bound`:
    the largest `apart` that rounding explains."""

    learner: float
    apart: float
    from_base: float
    bound: float

    @property
    def telling(self) -> bool:
        """Whether a sampler that ignores the adapter would be told from one that applies it."""
        return self.learner > self.bound

    @property
    def wrong(self) -> bool:
        """Whether the sampler's logprobs do not move as the learner's."""
        return self.telling and not self.apart <= self.bound

    def __str__(self) -> str:
        text = (
            f"a random adapter moves the learner's logprobs by {self.learner:.1e} nats on average, and the sampler's then "
            f"differ from them by {self.apart:.1e}"
        )
        if not self.telling:
            return f"not compared: {text}, which shows nothing: sampler and learner differ as much without it"
        return f"wrong: {text}; rounding explains {self.bound:.1e}" if self.wrong else f"ok, {text}"


@dataclass(frozen=True)
class _Answer:
    """A sampled answer: ids of prompt and completion, and its logprobs, NaN where the sampler gave none, but for some."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: NDArray[np.float64]

    def differences(self, computed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Absolute differences from the learner's logprobs, of the tokens that have one."""
        return np.abs(self.logprobs - computed)[np.isfinite(self.logprobs)]


async def check_logprobs(services: Services) -> Agreement | None:
    """Sample two short calls that are not recorded, one of the base and one with a random adapter, and compare their
    logprobs with the learner's. The results become facts of the learner, and lines in the log. Returns that of the base;
    None without a learner on its device, or if it failed; then the log says why.

    Raises EngineError if the sampler applies the adapter otherwise than the learner: no training would reach it."""
    learner = services.learner
    if learner is None:
        return None
    try:
        await learner.started()
        if learner.state != "ready":
            raise EngineError("the learner did not start")
        async with asyncio.timeout(SECONDS):
            agreement, movement = await _compare(services, learner)
    except (OffbookError, TimeoutError) as error:
        error = error if str(error) else EngineError(f"no answer within {SECONDS:g} s")
        logger.warning("The logprobs of sampler and learner were not compared: %s", error)
        learner.note(FACT, f"not compared: {error}")
        return None
    finally:
        await asyncio.to_thread(shutil.rmtree, _folder(services), ignore_errors=True)  # the next start removes the rest
    _report(learner, agreement)
    if movement is not None:
        learner.note(ADAPTER_FACT, str(movement))
        logger.info("Adapters before training: %s", movement)
        if movement.wrong:
            raise EngineError(_refusal(movement))
    return agreement


async def write_adapter(services: Services) -> None:
    """Let the learner write the random adapter for `check_logprobs`, before the sampler is started. Needed where the learner
    leaves the GPU to the sampler; otherwise it is written when it is needed."""
    learner = services.learner
    if learner is None or learner.state != "ready":
        return
    try:
        await _score(learner, range(16), range(16, 16 + TOKENS), _folder(services))
    except OffbookError as error:
        _not_compared(learner, error)


async def _compare(services: Services, learner: LearnerClient) -> tuple[Agreement, Movement | None]:
    """The comparisons of the base and of the random adapter; None if the second is not possible. Raises EngineError,
    ApiError."""
    offloaded, folder = _offloads(services), _folder(services)
    async with services.models.leases.lease(services.base.name) as route:
        plain = await _sample(services, route.adapter)
    adapted: _Answer | None = None
    try:
        if not offloaded:
            await _score(learner, plain.prompt, plain.completion, folder)
        if folder.is_dir():
            adapted = await _sample_adapted(services, folder)
    except OffbookError as error:
        _not_compared(learner, error)
    async with _on_device(services):
        difference = plain.differences(await _score(learner, plain.prompt, plain.completion))
        agreement = Agreement(len(difference), float(difference.mean()), float(difference.max()), _bound(learner.facts))
        if adapted is None:
            return agreement, None
        without = await _score(learner, adapted.prompt, adapted.completion)
        within = await _score(learner, adapted.prompt, adapted.completion, folder)
    moved = float(np.abs(within - without).mean())
    apart, from_base = (float(adapted.differences(values).mean()) for values in (within, without))
    return agreement, Movement(moved, apart, from_base, 2 * max(agreement.bound, agreement.mean) + moved / 10)


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


def _not_compared(learner: LearnerClient, error: OffbookError) -> None:
    logger.warning("The sampler's adapters were not compared with the learner's: %s", error)
    learner.note(ADAPTER_FACT, f"not compared: {error}")


def _refusal(movement: Movement) -> str:
    ignored = movement.from_base <= movement.bound
    return (
        f"The sampler {'ignores adapters' if ignored else 'applies adapters otherwise than the learner'}, so training would "
        f"{'never change' if ignored else 'not change as computed'} what it samples: {str(movement).removeprefix('wrong: ')}. "
        "The sampler's log names modules that it left out: choose another base model, --loader or --engine"
    )


def _folder(services: Services) -> Path:
    return services.options.dir.absolute() / FOLDER


def _offloads(services: Services) -> bool:
    sharing = services.engine.sharing
    return sharing is not None and sharing.layout == "offload"


def _on_device(services: Services) -> AbstractAsyncContextManager[None]:
    """The learner may use its device inside the block: a sampler that has the GPU to itself sleeps."""
    return services.engine.free_gpu(services.sampler.calls) if _offloads(services) else nullcontext()


def _bound(facts: dict[str, str]) -> float:
    dtype, _, rest = facts.get("dtype", "float32").partition(",")
    return 4 * BOUNDS["bfloat16"] if rest else BOUNDS.get(dtype, BOUNDS["bfloat16"])


async def _sample_adapted(services: Services, folder: Path) -> _Answer:
    """An answer under the random adapter, which the sampler has only meanwhile. Raises EngineError, ApiError."""
    adapters = services.sampler.adapters
    await adapters.load(ADAPTER, folder)
    try:
        return await _sample(services, ADAPTER)
    finally:
        await adapters.unload(ADAPTER)


async def _sample(services: Services, adapter: str) -> _Answer:
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
    logprobs = np.asarray(choice.logprobs, np.float64)
    if not np.isfinite(logprobs).any():
        raise EngineError("the sampler gives no logprobs")
    if len(logprobs) != len(choice.token_ids):
        raise EngineError(f"the sampler gave {len(logprobs)} logprobs for {len(choice.token_ids)} tokens")
    return _Answer(tuple(sampled.prompt_ids or ()), tuple(choice.token_ids), logprobs)


async def _score(
    learner: LearnerClient, prompt: Sequence[int], completion: Sequence[int], adapter: Path | None = None
) -> NDArray[np.float64]:
    command = ScoreCommand(
        request_id=uuid.uuid4().hex,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        temperature=TEMPERATURE,
        adapter=adapter,
    )
    async with aclosing(learner.run(command)) as events:
        async for event in events:
            if isinstance(event, CompletionScored):
                return np.asarray(event.logprobs)
            if isinstance(event, Failed):
                raise EngineError(event.message)
    raise EngineError("the learner ended without an answer; its log says why")
