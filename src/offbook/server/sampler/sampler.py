"""The interfaces of a sampler, which may be one process or a pool, and how an engine deviates from OpenAI's API."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import aiohttp

from offbook.base.types import Json

from .transport import MAX_ANSWER, Reply


@dataclass(frozen=True)
class Quirks:
    """Deviations that the gateway compensates for. The defaults describe an engine without any."""

    grammar_for_strict_tools: bool = False
    """vLLM decodes under a grammar even with tool_choice "auto" if a tool is strict or parallel_tool_calls is false."""
    no_seed: bool = False
    """vLLM on a CPU crashes if many calls have a seed, so seeds are not sent to it."""
    stream_blocks: bool = False
    """vLLM streams several tokens in a chunk if asked (`stream_interval`), and the base's answers need no reasoning parser."""
    flat_logprobs: bool = False
    """vLLM returns logprobs as a flat list with our plugin; without it, it ignores the request field."""
    thinking_budgets: bool = False
    """vLLM ends a thought after `thinking_token_budget` tokens."""
    template: frozenset[str] | None = None
    """The words of the base's chat templates, among them their variables; None: they are not known."""


SamplerState = Literal["starting", "ok", "failed", "stopped"]
"""ok: calls are answered. starting: calls wait. failed: calls get the reason as an error; a later call starts it
again."""


class SamplerCalls(Protocol):
    """Calls of a sampler: chat completions and completions of a prompt; and its sleep mode, which frees the GPU for a train step."""

    @property
    def in_flight(self) -> int:
        """Number of calls that have not been answered completely."""
        ...

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER, trajectory: str | None = None) -> Reply:
        """Send a call and return the whole answer, whatever its HTTP status. With `prompt` it is a completion, else a chat.

        A pool sends calls of one `trajectory` to one member, which has their prefix cached.
        Raises EngineError if the sampler cannot answer, and WrongAnswer for more than `limit` bytes.
        """
        ...

    def stream(
        self, payload: Mapping[str, Json], trajectory: str | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Open a streamed call; `trajectory` as in `post`.

        Entered at the response's first bytes; leaving cancels it. Raises EngineError.
        """
        ...

    def asleep(self, *, keep_weights: bool = False) -> AbstractAsyncContextManager[None]:
        """Free the sampler's GPU memory inside the block; with `keep_weights`, only its KV cache.

        Entering waits for the calls in flight. Calls that arrive inside the block wait for its end. Raises EngineError.
        """
        ...

    async def queue_seconds(self) -> float | None:
        """Mean seconds that calls waited in the engine's queue since this was last called.

        None if there was no call, or the engine does not measure it.
        """
        ...


class SamplerAdapters(Protocol):
    """The LoRA adapters of a sampler, by the model names that calls use for them."""

    @property
    def loaded(self) -> Collection[str]:
        """The names of the adapters."""
        ...

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under the name `adapter`; a loaded name is left as it is. Raises EngineError."""
        ...

    async def unload(self, adapter: str) -> None:
        """Unload an adapter; an unknown name is ignored. Raises EngineError."""
        ...


class Sampler(Protocol):
    """A sampler: its life cycle, its calls and its adapters."""

    @property
    def calls(self) -> SamplerCalls:
        """Chat completions."""
        ...

    @property
    def adapters(self) -> SamplerAdapters:
        """LoRA adapters."""
        ...

    @property
    def state(self) -> SamplerState:
        """Whether calls are answered now."""
        ...

    @property
    def detail(self) -> str | None:
        """Why it failed, or the progress of its start; None if there is nothing to report."""
        ...

    @property
    def restarts(self) -> int:
        """How often it was started again, after a death or a failed start."""
        ...

    def start(self) -> None:
        """Start in the background; `ready` waits for it."""
        ...

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason if it cannot be started or reached."""
        ...

    async def started(self) -> None:
        """Wait until the server may go on with its start. Raises EngineError with the reasons if it may not.

        As `ready`, but a pool waits for all members that this server starts.
        """
        ...

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop the sampler within `deadline` seconds; a vLLM that this process did not start keeps running."""
        ...

    def kill(self) -> None:
        """Kill the sampler without waiting if it is a child of this process."""
        ...
