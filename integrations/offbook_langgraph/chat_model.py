"""`ChatOffbook`: a LangChain chat model that calls an Offbook server, and how one is made for a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import httpx
import openai
from langchain_core.caches import BaseCache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.json_files import parse_json
from offbook.base.types import CallOrigin, Message
from offbook.base.wire import call_headers
from offbook.client.connection.http import LoopTransport
from offbook.client.model import EndpointModel
from offbook.client.rollouts.capture import call_answered, check_answer, forced_temperature


def plain_streams(client: Any) -> Any:
    """Replace a sync or async SDK client for langchain-openai's call that starts such a stream."""

    def stream(**options: Any) -> ChunkStream:
        return ChunkStream(client.beta.chat.completions.stream(**options))

    chat = SimpleNamespace(completions=SimpleNamespace(stream=stream))
    return SimpleNamespace(beta=SimpleNamespace(chat=chat))


class ChunkStream:
    """The SDK's parsed stream, reduced to its chunk events as dicts.

    langchain-openai serialises every event, including a snapshot of the response so far. The snapshot's `parsed` field has
    another type than the SDK declares, so pydantic would warn at every chunk.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> ChunkStream:
        self._stream = self._manager.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_chunk_of(event) for event in self._stream if event.type == "chunk")

    async def __aenter__(self) -> ChunkStream:
        self._stream = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._manager.__aexit__(kind, error, trace)

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return (_chunk_of(event) async for event in self._stream if event.type == "chunk")

    def get_final_completion(self) -> Any:
        """The complete parsed response; an awaitable for an async stream."""
        return self._stream.get_final_completion()


def _chunk_of(event: Any) -> dict[str, Any]:
    return {"type": event.type, "chunk": event.chunk.model_dump()}


URL_VARIABLE = "OFFBOOK_URL"
KEY_VARIABLE = "OFFBOOK_API_KEY"
MARK = "offbook"
"""Key of `response_metadata` for the recorded call that sampled the message: {trajectory_id, call_id, index, step}."""
RAW_ARGUMENTS = "offbook_arguments"
"""Key of `additional_kwargs` for the tool arguments exactly as they were sampled, by tool call id."""
THOUGHT = "reasoning_content"
"""Key of `additional_kwargs` for the reasoning text; LangChain's integrations of reasoning models use the same key."""


class OwnMethods(Protocol):
    """Methods of `BaseChatOpenAI` that an app overrides: `_get_request_payload`, and the two that read answers."""

    def payload(self, ours: dict[str, Any], input_: Any, stop: list[str] | None, kwargs: dict[str, Any]) -> Any: ...

    def result(self, response: Any, generation_info: dict[str, Any] | None) -> Any: ...

    def chunk(self, chunk: dict[str, Any], kind: type, info: dict[str, Any] | None) -> Any: ...


class ChatOffbook(ChatOpenAI):
    """A chat model on an Offbook server: `ChatOffbook(model="agent-001", base_url="http://host:8000/v1", api_key=...)`.

    `base_url` and `api_key` default to OFFBOOK_URL and OFFBOOK_API_KEY, never to OpenAI's variables. Raises ConfigError
    without a URL.

    Differences from ChatOpenAI: no retries; no timeout between the chunks of a stream, since calls queue on a small machine;
    usable from any event loop; calls carry their trajectory and origin; reasoning and tool arguments are sent back exactly
    as they were sampled, so that the next prompt extends the previous one.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # the input contains the key

    model_name: str = Field(alias="model")
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    max_retries: int | None = 0
    stream_chunk_timeout: float | None = None
    openai_proxy: str | None = None  # OPENAI_PROXY of the environment is meant for the app's own models
    trajectory_id: str | None = Field(default=None, description="the trajectory that owns the calls")
    origin: CallOrigin | None = Field(default=None, description="where in the app the calls are made")
    fit: bool = Field(
        default=False, description="lower max_tokens to the room in the context: it was set for another model"
    )
    longest: int | None = Field(
        default=None, ge=1, description="most tokens of an answer; a smaller limit of the call wins"
    )
    cache: BaseCache | bool | None = Field(default=False, exclude=True)  # an answer is sampled anew for each call
    _recorded: Callable[[str, int], None] | None = PrivateAttr(default=None)
    _own: OwnMethods | None = PrivateAttr(default=None)

    def on_recorded(self, callback: Callable[[str, int], None]) -> None:
        """Call `callback` with the id of every recorded call, and the number of the choice, when it is answered."""
        self._recorded = callback

    def with_methods(self, own: OwnMethods | None) -> None:
        """Write requests and read answers also by the methods that an app's chat model class overrides."""
        self._own = own

    @model_validator(mode="before")
    @classmethod
    def _connect(cls, values: Any) -> Any:
        """Fill in the server's URL, its key and an HTTP client with connections per event loop.

        langchain-openai's own async client is shared by all event loops, and fails in the second one.
        """
        fields = {**cast(dict[str, Any], values)}
        named = (fields.pop("base_url", None), fields.pop("openai_api_base", None), os.environ.get(URL_VARIABLE))
        url = str(next(filter(None, named), ""))
        if not url:
            raise ConfigError(f"base_url: missing; pass base_url='http://host:8000/v1', or set {URL_VARIABLE}")
        keys = (fields.pop("api_key", None), fields.pop("openai_api_key", None), os.environ.get(KEY_VARIABLE))
        fields["base_url"] = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        fields["api_key"] = next(filter(None, keys), "none")
        if fields.get("http_async_client") is None:
            transport = LoopTransport(secure=not url.startswith("http://"))
            fields["http_async_client"] = httpx.AsyncClient(transport=transport)
        return fields

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: Any) -> Any:
        """Override langchain-openai's validator, which changes the temperature of models with a name of OpenAI's."""
        return values

    @property
    def _llm_type(self) -> str:
        return "offbook"

    def _resolve_model_profile(self) -> None:
        """No profile: ChatOpenAI would use OpenAI's for a model with a name of OpenAI's."""

    @property
    def lc_secrets(self) -> dict[str, str]:
        """LangChain's map of secret fields to environment variables."""
        return {"openai_api_key": KEY_VARIABLE}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """LangChain's serialisation namespace: this module."""
        return cls.__module__.split(".")

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Serialise as LangChain does, with the key as a reference to OFFBOOK_API_KEY."""
        written = super().to_json()
        if written["type"] == "constructor":  # langchain-core lets ChatOpenAI's lc_secrets win over ours
            written["kwargs"]["openai_api_key"] = {"lc": 1, "type": "secret", "id": [KEY_VARIABLE]}
        return written

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids from `custom_get_token_ids`. Raises NotImplementedError without it.

        ChatOpenAI would download tiktoken's encoding, which is not the model's tokenizer.
        """
        if self.custom_get_token_ids is None:
            raise NotImplementedError(
                f"{self.model_name!r}: its tokenizer is on the server. Pass custom_get_token_ids=tokenizer.encode, count "
                "with langchain_core.messages.utils.count_tokens_approximately, or read an answer's usage_metadata"
            )
        return self.custom_get_token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """Number of tokens in the messages' text, without those of the chat template. Needs `custom_get_token_ids`."""
        return BaseChatModel.get_num_tokens_from_messages(self, list(messages), tools)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if payload["stream"] and (payload.get("n") or 1) > 1:
            raise ConfigError(
                f"n={payload['n']}: a stream holds one message, and several would be mixed; use generate, or n=1"
            )
        messages = self._convert_input(input_).to_messages()
        written: list[Message] = payload["messages"]
        if self._own is not None:
            payload = self._own.payload(payload, input_, stop, kwargs)
        for message, sent in zip(messages, written, strict=True):
            if isinstance(message, AIMessage):
                if sent.get("tool_calls"):
                    sent["tool_calls"] = as_sampled(message, sent["tool_calls"])
                thought = message.additional_kwargs.get(THOUGHT)
                if thought or RAW_ARGUMENTS in message.additional_kwargs:
                    sent["reasoning"] = thought or ""  # "" for a call that was sampled without a thought
            elif isinstance(message, SystemMessage):  # ChatOpenAI writes "developer" for some model names
                sent["role"] = message.additional_kwargs.get("__openai_role__", "system")
        own: dict[str, str] = payload.get("extra_headers") or {}
        if self.longest is not None:
            wanted = [payload.pop(name) for name in ("max_tokens", "max_completion_tokens") if payload.get(name)]
            payload["max_completion_tokens"] = min([self.longest, *wanted])
        headers = own | call_headers(self.trajectory_id, self.origin, fit=self.fit)
        if headers:
            payload["extra_headers"] = headers
        return payload if _parsed_by_sdk(payload) else as_plain_json(payload)

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result: ChatResult = (
            super()._create_chat_result(response, generation_info)  # pyright: ignore[reportUnknownMemberType]
            if self._own is None
            else self._own.result(response, generation_info)
        )
        plain: dict[str, Any] = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation, choice in zip(result.generations, plain["choices"], strict=True):
            self._mark(generation.message, choice)
            keep_reasoning(generation.message, choice["message"])
            calls: list[Message] = choice["message"].get("tool_calls") or []
            if calls:
                raw: dict[str, str] = {call["id"]: call["function"]["arguments"] for call in calls}
                generation.message.additional_kwargs[RAW_ARGUMENTS] = raw
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        generation: ChatGenerationChunk | None = (
            super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)  # pyright: ignore[reportUnknownMemberType]
            if self._own is None
            else self._own.chunk(chunk, default_chunk_class, base_generation_info)
        )
        inner: dict[str, Any] = chunk.get("chunk") or chunk
        choices: list[dict[str, Any]] = inner.get("choices") or []
        if generation is not None and choices:
            self._mark(generation.message, choices[0])
            keep_reasoning(generation.message, choices[0].get("delta") or {})
        return generation

    def _mark(self, message: BaseMessage, choice: dict[str, Any]) -> None:
        """Store the recorded call in the message's metadata and report it. Raises CaptureError for a replayed answer."""
        mark = choice.get(MARK)
        if mark:
            check_answer(self.trajectory_id, mark["trajectory_id"], mark["call_id"])
            message.response_metadata[MARK] = mark
            call_answered(mark["trajectory_id"], mark["call_id"])
            if self._recorded is not None:
                self._recorded(mark["call_id"], mark["index"])

    def _streaming(self, arguments: Mapping[str, Any]) -> ChatOffbook:
        """A copy whose SDK clients stream parsed responses without pydantic's warnings; self if nothing is parsed."""
        if "response_format" not in {**self.model_kwargs, **arguments}:
            return self
        clients = ("root_client", "root_async_client")
        return self.model_copy(update={name: plain_streams(getattr(self, name)) for name in clients})

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        raw = RawArguments()
        for chunk in ChatOpenAI._stream(self._streaming(kwargs), *args, **kwargs):
            yield raw.note(chunk)

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        raw = RawArguments()
        async for chunk in ChatOpenAI._astream(self._streaming(kwargs), *args, **kwargs):
            yield raw.note(chunk)


def keep_reasoning(message: BaseMessage, answer: Mapping[str, Any]) -> None:
    """Store the reasoning text of a response message, or of a chunk's delta, with the LangChain message."""
    if thought := answer.get("reasoning") or answer.get("reasoning_content"):
        message.additional_kwargs[THOUGHT] = thought


def as_plain_json(payload: dict[str, Any]) -> dict[str, Any]:
    """Move messages, tools and format to `extra_body`, which the SDK sends unchanged.

    As arguments, the SDK walks through them by their declared types at every call: a third of the client's time in a rollout.
    """
    moved = {name: payload[name] for name in ("messages", "tools", "response_format") if name in payload}
    kept = {name: value for name, value in payload.items() if name not in moved}
    return {**kept, "messages": [], "extra_body": {**(payload.get("extra_body") or {}), **moved}}


def _parsed_by_sdk(payload: dict[str, Any]) -> bool:
    """Whether the SDK's `parse` should read the response into the class given as `response_format`.

    `parse` rejects tools that are not strict. Apps written for other providers have such tools beside a JSON schema, and
    parse the response themselves.
    """
    if "response_format" not in payload:
        return False
    tools: list[dict[str, Any]] = payload.get("tools") or []
    return isinstance(payload["response_format"], type) or all(tool["function"].get("strict") for tool in tools)


class RawArguments:
    """Collects the argument text of a stream's tool calls and attaches it to the finishing chunk."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    def note(self, chunk: ChatGenerationChunk) -> ChatGenerationChunk:
        """Add a chunk's argument text, and return the chunk."""
        if not isinstance(chunk.message, AIMessageChunk):
            return chunk
        for part in chunk.message.tool_call_chunks:
            index = part.get("index") or 0
            if part["id"]:
                self._ids[index] = part["id"]
            self._texts[index] = self._texts.get(index, "") + (part["args"] or "")
        if self._ids and (chunk.generation_info or {}).get("finish_reason"):
            chunk.message.additional_kwargs[RAW_ARGUMENTS] = {self._ids[i]: self._texts[i] for i in self._ids}
        return chunk


def as_sampled(message: AIMessage, calls: list[Message]) -> list[Message]:
    """The tool calls in sampled order, with the sampled argument text unless the app changed the arguments."""
    raw = cast(dict[str, str], message.additional_kwargs.get(RAW_ARGUMENTS, {}))
    order = {call_id: index for index, call_id in enumerate(raw)}
    return sorted(
        (_with_raw_text(call, raw.get(call["id"])) for call in calls),
        key=lambda call: order.get(call["id"], len(order)),
    )


def _with_raw_text(call: Message, raw: str | None) -> Message:
    if raw is None:
        return call
    try:
        if parse_json(raw) != parse_json(call["function"]["arguments"]):
            return call
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": raw}}


Result = TypeVar("Result")
Answering: TypeAlias = TrainableModel | EndpointModel
"""A model that can answer an app's calls and have them recorded."""

_by_connection: WeakKeyDictionary[object, ChatOffbook] = WeakKeyDictionary()
"""Chat models by connection: all models of one server share a client."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_by_connection.clear)  # the connections belong to the parent process


async def chat_model(
    model: Answering, temperature: float | None, step: int | None = None, longest: int | None = None
) -> ChatOffbook:
    """Create a chat model for the newest step, for step `step`, or for the endpoint of another LLM.

    Registers the model if needed. An evaluation's temperature overrides `temperature`. `longest`: see `ChatOffbook`.
    """
    api = model.endpoint if isinstance(model, EndpointModel) else await model.api()
    shared = _by_connection.get(api)
    if shared is None:
        shared = ChatOffbook(model=model.name, base_url=f"{api.url}/v1", api_key=SecretStr(api.key or "none"))
        _by_connection[api] = shared
    forced = forced_temperature()
    chosen = temperature if forced is None else forced
    name = model.inference_name(step)
    return shared.model_copy(update={"model_name": name, "temperature": chosen, "longest": longest})


def in_own_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from sync code, also inside a running event loop: in a thread, with a copy of this context."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, work).result()
