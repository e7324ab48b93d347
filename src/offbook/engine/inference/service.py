"""Renders requests, converts them to generations, queues them, and passes the scheduler's updates to the event loop."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from offbook.base.errors import ConfigError

from ..chat_template import ChatTemplate, PromptError
from ..protocol import TOO_LONG
from .chat.answer_shape import ShapeCompiler, TimeLimitedPool, shape_of
from .chat.answers import AnswerWriter, CompletionWriter
from .chat.grammar import Grammars
from .chat.requests import (
    NOT_FOUND,
    ChatCompletionRequest,
    CompletionRequest,
    DialectError,
    SamplingRequest,
    read_chat,
    read_completion,
    shortened,
)
from .chat.thoughts import CLOSE, OPEN
from .chat.tool_calls import HERMES, CallFormat
from .decoding.adapters import Adapter, load_adapter
from .decoding.generation import Decoder, Generation, Settings, StopDetector, Update
from .decoding.model import ModelRunner
from .decoding.scheduler import Scheduler

logger = logging.getLogger(__name__)

R = TypeVar("R")

_SEED_BITS = 2**64 - 1
_SMALL = 16 * 2**10
"""Largest request, in bytes, that is parsed and rendered on the event loop. Larger ones use a thread."""


class SamplingService:
    """The engine's interface for the HTTP API. Runs on one event loop; the scheduler has its own thread."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        name: str,
        max_batch: int,
        calls: CallFormat = HERMES,
        thinks: bool = False,
        prompt_date: datetime.date | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.runner = runner
        self.calls = calls
        self._thinks = thinks
        self.decoder = Decoder(runner.tokenizer, kept=(*HERMES.marks, *calls.marks, OPEN, CLOSE))
        self.adapters: dict[str, Adapter] = {}
        self._renderer = ChatRenderer(runner.tokenizer, runner.max_model_len, prompt_date)
        for warning in self._renderer.template.warnings(runner.eos):
            logger.warning("%s", warning)
        self._rendering = TimeLimitedPool(4)
        grammars = Grammars(runner.tokenizer, runner.eos, runner.vocabulary)
        self._shape_compiler = ShapeCompiler(grammars)
        self._scheduler = Scheduler(runner, self._deliver, max_batch=max_batch, on_death=on_death)
        self._inboxes: dict[Generation, asyncio.Queue[tuple[int, Update]]] = {}
        self._places: dict[Generation, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the scheduler's thread. Must be called on the event loop that awaits the updates."""
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()

    def close(self) -> None:
        """End the scheduler's thread."""
        self._scheduler.close()

    @property
    def dead(self) -> bool:
        """Whether the scheduler's thread has died."""
        return self._scheduler.dead

    @property
    def running(self) -> int:
        """Number of generations that a request waits for."""
        return len(self._inboxes)

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter from a folder. Raises DialectError if the name is in use or the folder is invalid."""
        if name == self.name or name in self.adapters:
            raise DialectError(
                f"The lora adapter {name!r} has already been loaded: use a new name",
                kind="InvalidUserInput",
                param="lora_name",
            )
        try:
            self.adapters[name] = await asyncio.to_thread(load_adapter, name, path, self.runner.layers)
        except ConfigError as error:
            raise DialectError(f"Loading lora {name} failed: {error}", param="lora_path") from error

    def unload(self, name: str) -> None:
        """Unload an adapter; queued calls that use it finish. Raises DialectError 404 for an unknown name."""
        adapter = self.adapters.pop(name, None)
        if adapter is None:
            raise DialectError(
                f"The lora adapter {name!r} cannot be found.", status=404, kind=NOT_FOUND, param="lora_name"
            )
        self._scheduler.forget(adapter)

    async def read(self, body: bytes) -> ChatCompletionRequest:
        """Parse a chat request. Raises DialectError, which names the first invalid field."""
        return await self._render(lambda: read_chat(body), len(body))

    async def read_completion(self, body: bytes) -> CompletionRequest:
        """Parse a request for a completion of a prompt. Raises DialectError, which names the first invalid field."""
        return await self._render(lambda: read_completion(body), len(body))

    async def generations(self, request: ChatCompletionRequest | CompletionRequest, size: int) -> list[Generation]:
        """The generations of a request, one per choice. `size` is the length of its body in bytes.

        Raises DialectError for an unknown model, a prompt or setting beyond the model's limits, or an invalid schema.
        """
        if request.model != self.name and request.model not in self.adapters:
            known = ", ".join([self.name, *self.adapters])
            raise DialectError(
                f"The model {shortened(request.model)} does not exist; there are: {known}",
                status=404,
                kind=NOT_FOUND,
                param="model",
            )
        adapter = self.adapters.get(
            request.model
        )  # before any await, so that an unload meanwhile does not affect this request
        shape = shape_of(request) if isinstance(request, ChatCompletionRequest) else None
        prompt_ids = await self._render(lambda: self._prompt_ids(request), size)
        if prompt_ids and max(prompt_ids) >= self.runner.vocabulary:
            raise DialectError(
                f"the prompt has token {max(prompt_ids)}, but the model has tokens 0 to {self.runner.vocabulary - 1}: the "
                "tokenizer was extended without the model; resize its embeddings, or leave that token's text out",
                param=request.prompt_field,
            )
        settings = self._settings(request, len(prompt_ids))
        masks = await self._shape_compiler.masks(shape, request.choices) if shape else []
        return [
            Generation(
                prompt_ids,
                settings if request.seed is None else _seeded(settings, request.seed, index),
                self.runner.eos,
                adapter,
                streamed=bool(request.stream),
                mask=masks[index] if masks else None,
                stop_detector=self._stop_detector(request),
            )
            for index in range(request.choices)
        ]

    def writer(
        self, request: ChatCompletionRequest | CompletionRequest, prompt_ids: tuple[int, ...]
    ) -> AnswerWriter | CompletionWriter:
        """The writer for the answer to a request."""
        if isinstance(request, CompletionRequest):
            return CompletionWriter(request, prompt_ids, self.decoder)
        return AnswerWriter(request, prompt_ids, self.decoder, self.calls, thinks=self._thinks)

    def submit(self, generations: Sequence[Generation]) -> asyncio.Queue[tuple[int, Update]]:
        """Queue generations. The returned queue receives (index in `generations`, update) until each has ended."""
        inbox: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        for place, generation in enumerate(generations):
            self._inboxes[generation] = inbox
            self._places[generation] = place
        self._scheduler.submit(generations)
        return inbox

    def release(self, generations: Sequence[Generation]) -> None:
        """Stop waiting for these generations, and cancel those that still run."""
        running = [generation for generation in generations if self._inboxes.pop(generation, None) is not None]
        for generation in generations:
            self._places.pop(generation, None)
        if running:
            self._scheduler.cancel(running)

    async def _render(self, work: Callable[[], R], size: int) -> R:
        if size <= _SMALL:
            return work()
        return await self._rendering.run(work, "messages", "the messages take too long to render: shorten them")

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

    def _prompt_ids(self, request: ChatCompletionRequest | CompletionRequest) -> tuple[int, ...]:
        if isinstance(request, ChatCompletionRequest):
            return self._renderer.prompt_ids(request)
        return self._renderer.plain_ids(request)

    def _settings(self, request: SamplingRequest, prompt: int) -> Settings:
        limit, vocabulary = self.runner.max_model_len, self.runner.vocabulary
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        requested = request.max_completion_tokens or request.max_tokens
        if prompt + (requested or 1) > limit:
            raise DialectError(
                f"the context is at most {limit} tokens (--max-model-len); the prompt has {prompt} and {field} is {requested}: "
                + (
                    f"lower {field} to {limit - prompt}"
                    if prompt < limit
                    else f"shorten the prompt by {prompt + 1 - limit}"
                ),
                param=field if prompt < limit else request.prompt_field,
                code=TOO_LONG,
            )
        max_tokens = requested or limit - prompt
        min_tokens, stop_token_ids = request.min_tokens or 0, request.stop_token_ids or []
        if min_tokens > max_tokens:
            raise DialectError(
                f"min_tokens {min_tokens} is more than {field} {max_tokens}: lower it", param="min_tokens"
            )
        for name, ids in (("stop_token_ids", stop_token_ids), ("logit_bias", list(request.logit_bias))):
            if invalid := [token for token in ids if not 0 <= token < vocabulary]:
                raise DialectError(f"{name}: {invalid} are not tokens: use ids from 0 to {vocabulary - 1}", param=name)
        return Settings(
            max_tokens=max_tokens,
            sampling=request.sampling,
            min_tokens=min_tokens,
            stop=request.stops,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=bool(request.ignore_eos),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=tuple(request.logit_bias.items()),
            top_logprobs=request.top_logprobs or 0,
        )

    def _stop_detector(self, request: SamplingRequest) -> StopDetector | None:
        if not request.stops:
            return None
        return StopDetector(self.decoder, request.stops, skip_special=request.skips_special)


def _seeded(settings: Settings, seed: int, index: int) -> Settings:
    """Add the choice's index to the seed, so that choices of one request differ."""
    return replace(settings, seed=(seed & _SEED_BITS, index))


_RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors", "chat_template"}
)
_NFC_SHRINKS = 4
"""Most characters that NFC composes into one: the longest canonical decomposition (Unicode Standard Annex 15)."""


class ChatRenderer:
    """Renders chats of up to `limit` tokens. Thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: int, prompt_date: datetime.date | None = None
    ) -> None:
        self.template = ChatTemplate(tokenizer, prompt_date)
        self._limit = limit
        # Byte-level tokens have one character per byte, so no token stands for more characters than the longest has.
        self._longest_text = limit * _NFC_SHRINKS * max(map(len, tokenizer.get_vocab()))
        self.template.encode("")  # the first call can change the tokenizer's settings, which is not thread-safe

    def prompt_ids(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        """The prompt's tokens.

        Raises DialectError for messages that the template cannot render or leaves out, or that are certainly longer than
        the context.
        """
        options = {
            "add_generation_prompt": request.add_generation_prompt is not False and not request.continue_final_message,
            "continue_final_message": bool(request.continue_final_message),
        }
        variables = request.chat_template_kwargs or {}
        if reserved := _RESERVED & variables.keys():
            raise DialectError(f"chat_template_kwargs may not set {sorted(reserved)}", param="chat_template_kwargs")
        options |= variables
        try:
            text = self.template.render(request.messages, request.tools, options)
        except PromptError as error:
            raise DialectError(str(error), param="messages") from error
        self._check_length(self.template.shown(text), "messages")
        return tuple(self.template.encode(text))

    def plain_ids(self, request: CompletionRequest) -> tuple[int, ...]:
        """The tokens of a prompt that no template changes. Raises DialectError for one that is longer than the context."""
        if not isinstance(request.prompt, str):
            return tuple(request.prompt)
        self._check_length(request.prompt, "prompt")
        return tuple(self.template.encode(request.prompt, special=request.add_special_tokens))

    def _check_length(self, text: str, param: str) -> None:
        if len(text) > self._longest_text:
            raise DialectError(
                f"the context is at most {self._limit} tokens (--max-model-len), and the prompt has {len(text)} characters: "
                "shorten the prompt",
                param=param,
                code=TOO_LONG,
            )
