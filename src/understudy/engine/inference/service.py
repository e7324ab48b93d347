"""From a request to queued calls, and from the scheduler's thread back to whoever awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ...errors import ConfigError
from ...types import Json
from .adapters import Adapter, load_adapter
from .chat import ChatRenderer
from .dialect import NOT_FOUND, ChatRequest, DialectError, shortened
from .generation import Generation, Settings, Update
from .grammar import GrammarError, GrammarMask, Grammars
from .hermes import CLOSE, OPEN
from .policy import Policy
from .scheduler import Scheduler
from .text import Decoder, StopWatch

_SEED_BITS = 2**64 - 1


class SamplingService:
    """The engine as the HTTP layer sees it. Runs on one event loop; the scheduler has its own thread."""

    def __init__(
        self, policy: Policy, *, name: str, max_batch: int, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.policy = policy
        self.decoder = Decoder(policy.tokenizer, kept=(OPEN, CLOSE))
        self.adapters: dict[str, Adapter] = {}
        self._renderer = ChatRenderer(policy.tokenizer)
        self._grammars = Grammars(policy.tokenizer, policy.eos, policy.vocabulary)
        self._scheduler = Scheduler(policy, self._deliver, max_batch=max_batch, on_death=on_death)
        self._inboxes: dict[Generation, asyncio.Queue[tuple[int, Update]]] = {}
        self._places: dict[Generation, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start sampling; called on the event loop that will await the answers."""
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()

    def close(self) -> None:
        """End the scheduler's thread."""
        self._scheduler.close()

    @property
    def dead(self) -> bool:
        """Whether nothing is sampled any more."""
        return self._scheduler.dead

    @property
    def running(self) -> int:
        """Calls that somebody awaits."""
        return len(self._inboxes)

    async def load(self, name: str, path: Path) -> None:
        """Serve an adapter folder under a new name."""
        if name == self.name or name in self.adapters:
            raise DialectError(
                f"The lora adapter {name!r} has already been loaded: use a new name",
                kind="InvalidUserInput",
                param="lora_name",
            )
        try:
            self.adapters[name] = await asyncio.to_thread(load_adapter, name, path, self.policy.layers)
        except ConfigError as error:
            raise DialectError(f"Loading lora {name} failed: {error}", param="lora_path") from error

    def unload(self, name: str) -> None:
        """Serve an adapter no longer; calls that were queued on it finish."""
        adapter = self.adapters.pop(name, None)
        if adapter is None:
            raise DialectError(
                f"The lora adapter {name!r} cannot be found.", status=404, kind=NOT_FOUND, param="lora_name"
            )
        self._scheduler.forget(adapter)

    async def generations(self, request: ChatRequest) -> list[Generation]:
        """The calls of a request, one per choice, checked against the model's limits."""
        if request.model != self.name and request.model not in self.adapters:
            known = ", ".join([self.name, *self.adapters])
            raise DialectError(
                f"The model {shortened(request.model)} does not exist; there are: {known}",
                status=404,
                kind=NOT_FOUND,
                param="model",
            )
        adapter = self.adapters.get(request.model)  # looked up before anything is awaited: the call keeps it
        prompt_ids = self._renderer.prompt_ids(request)
        if prompt_ids and max(prompt_ids) >= self.policy.vocabulary:
            raise DialectError(
                f"the prompt has token {max(prompt_ids)}, but the model knows 0 to {self.policy.vocabulary - 1}: the "
                "tokenizer was extended without the model; resize its embeddings, or leave that token's text out",
                param="messages",
            )
        settings = self._settings(request, len(prompt_ids))
        masks = await self._masks(request)
        return [
            Generation(
                prompt_ids,
                settings if request.seed is None else _seeded(settings, request.seed, index),
                self.policy.eos,
                adapter,
                streamed=request.stream,
                mask=masks[index] if masks else None,
                stop_watch=self._stop_watch(request),
            )
            for index in range(request.n)
        ]

    def submit(self, generations: Sequence[Generation]) -> asyncio.Queue[tuple[int, Update]]:
        """Queue calls; the inbox gets (place among `generations`, update) until each has ended."""
        inbox: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        for place, generation in enumerate(generations):
            self._inboxes[generation] = inbox
            self._places[generation] = place
        self._scheduler.submit(generations)
        return inbox

    def release(self, generations: Sequence[Generation]) -> None:
        """Nobody awaits these calls any more: those still running are cancelled."""
        running = [generation for generation in generations if self._inboxes.pop(generation, None) is not None]
        for generation in generations:
            self._places.pop(generation, None)
        if running:
            self._scheduler.cancel(running)

    def _deliver(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        assert self._loop is not None, "started before anything is submitted"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, updates)

    def _dispatch(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        for generation, update in updates:
            inbox = self._inboxes.get(generation)
            if inbox is not None:
                inbox.put_nowait((self._places[generation], update))
                if update.finish or update.failure:
                    del self._inboxes[generation]

    def _settings(self, request: ChatRequest, prompt: int) -> Settings:
        limit, vocabulary = self.policy.max_model_len, self.policy.vocabulary
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        wanted = request.max_completion_tokens or request.max_tokens
        if prompt + (wanted or 1) > limit:
            raise DialectError(
                f"the context is at most {limit} tokens (--max-model-len); the prompt has {prompt} and {field} is {wanted}: "
                + (
                    f"lower {field} to {limit - prompt}"
                    if prompt < limit
                    else f"shorten the prompt by {prompt + 1 - limit}"
                ),
                param=field if prompt < limit else "messages",
            )
        most = wanted or limit - prompt
        if request.min_tokens > most:
            raise DialectError(f"min_tokens {request.min_tokens} is more than {field} {most}", param="min_tokens")
        for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", list(request.logit_bias))):
            if wrong := [token for token in ids if not 0 <= token < vocabulary]:
                raise DialectError(f"{name}: {wrong} are no tokens; ids go from 0 to {vocabulary - 1}", param=name)
        return Settings(
            max_tokens=most,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            min_tokens=request.min_tokens,
            stop=request.stops,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=tuple(request.logit_bias.items()),
            top_logprobs=request.top_logprobs,
        )

    async def _masks(self, request: ChatRequest) -> list[GrammarMask]:
        """A grammar per choice, or none. Compiling may take long, so it runs beside the event loop.

        With tools to choose from, a response_format shapes the answer, as it does in OpenAI's API: calls stay possible."""
        tools = _forced(request)
        shape = request.response_format
        kind = None if shape is None or shape.type == "text" else shape.type
        if not tools and not kind:
            return []
        param = "tool_choice" if tools else "response_format"
        if tools and kind:
            raise DialectError("response_format cannot be combined with a forced tool_choice", param=param)
        if request.min_tokens or request.ignore_eos:
            raise DialectError(f"min_tokens and ignore_eos cannot be combined with {param}", param=param)
        free = _checked(request.tools or []) if request.tool_choice in (None, "auto") else []
        schema: Json = shape.json_schema.schema_ if shape and shape.json_schema else None
        if kind == "json_schema" and schema is None:
            raise DialectError("response_format.json_schema.schema is missing", param=param)

        field, parallel = "response_format.json_schema.schema", request.parallel_tool_calls

        def compile_mask() -> GrammarMask:
            if tools:
                return self._grammars.tool_calls(tools, parallel=parallel)
            if free:
                wanted = schema if kind == "json_schema" else {"type": "object"}
                return self._grammars.tool_calls_or_json(free, wanted, field, parallel=parallel)
            return self._grammars.json_object() if kind == "json_object" else self._grammars.json_schema(schema, field)

        try:
            return await asyncio.to_thread(lambda: [compile_mask() for _ in range(request.n)])
        except GrammarError as error:
            raise DialectError(str(error), param="tools" if tools else param) from error

    def _stop_watch(self, request: ChatRequest) -> StopWatch | None:
        if not request.stops:
            return None
        return StopWatch(self.decoder, request.stops, skip_special=request.skip_special_tokens)


def _seeded(settings: Settings, seed: int, index: int) -> Settings:
    """Choices of one seeded request differ by their index."""
    return replace(settings, seed=(seed & _SEED_BITS, index))


def _forced(request: ChatRequest) -> list[Json]:
    """The tools of which one must be called; empty when none must."""
    choice = request.tool_choice
    if choice is None or choice == "auto" or choice == "none":
        return []
    tools = _checked(request.tools or [])
    if not tools:
        raise DialectError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not named:
        raise DialectError(
            f"tool_choice names {shortened(choice.function.name)}, which is not among the tools", param="tool_choice"
        )
    return named


def _checked(tools: list[Json]) -> list[Json]:
    """The tools, each with a name."""
    for at, tool in enumerate(tools):
        function: Json = tool.get("function")
        if not isinstance(function, dict) or not isinstance(cast(Json, function).get("name"), str):
            raise DialectError(f"tools.{at}.function.name is missing (got {shortened(tool)})", param="tools")
    return tools
