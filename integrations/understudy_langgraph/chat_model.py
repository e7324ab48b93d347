"""`ChatUnderstudy`: a LangChain chat model on an Understudy endpoint."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import httpx
import openai
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from understudy.integration import CallOrigin, ConfigError, LoopTransport, Message, call_answered, call_headers

from .parsed_streams import plain_streams

URL_VARIABLE = "UNDERSTUDY_URL"
KEY_VARIABLE = "UNDERSTUDY_API_KEY"
MARK = "understudy"
"""Key of `response_metadata`: the recorded call that made the message ({trajectory_id, call_id, index, step})."""
RAW_ARGUMENTS = "understudy_arguments"
"""Key of `additional_kwargs`: tool call id -> the arguments exactly as they were sampled."""


THOUGHT = "reasoning_content"
"""Key of `additional_kwargs`: what the model thought before it answered, as LangChain's own models of thinking models name it."""


class ChatUnderstudy(ChatOpenAI):
    """`ChatUnderstudy(model="agent-001", base_url="http://host:8000/v1", api_key=...)`; without `base_url` and `api_key`, those
    of UNDERSTUDY_URL and UNDERSTUDY_API_KEY, never OpenAI's.

    Differs from ChatOpenAI: no hidden retries, no limit between a stream's chunks (calls wait for their turn on a small
    machine), usable from any event loop, calls labelled with their trajectory and origin, and thoughts and tool arguments
    sent back as they were sampled, so that the next prompt extends the last one.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # the input has the key

    model_name: str = Field(alias="model")
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    max_retries: int | None = 0
    stream_chunk_timeout: float | None = None
    openai_proxy: str | None = None  # the environment's OPENAI_PROXY is for the app's own models
    trajectory_id: str | None = Field(default=None, description="the trajectory that owns the calls")
    origin: CallOrigin | None = Field(default=None, description="where in the app the calls are made")
    fit: bool = Field(
        default=False, description="max_tokens was set for another model: no more than the context has room"
    )
    longest: int | None = Field(default=None, ge=1, description="tokens of an answer, where no smaller limit is set")
    _recorded: Callable[[str], None] | None = PrivateAttr(default=None)

    def on_recorded(self, told: Callable[[str], None]) -> None:
        """Tell the id of each call that is answered and was recorded."""
        self._recorded = told

    @model_validator(mode="before")
    @classmethod
    def _connect(cls, values: Any) -> Any:
        """Our server's address and key, and connections per event loop: langchain-openai's own async client is shared by
        all loops, and fails in the second one."""
        given = {**cast(dict[str, Any], values)}
        named = (given.pop("base_url", None), given.pop("openai_api_base", None), os.environ.get(URL_VARIABLE))
        url = str(next(filter(None, named), ""))
        if not url:
            raise ConfigError(f"base_url: not given; pass base_url='http://host:8000/v1', or set {URL_VARIABLE}")
        keys = (given.pop("api_key", None), given.pop("openai_api_key", None), os.environ.get(KEY_VARIABLE))
        given["base_url"] = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        given["api_key"] = next(filter(None, keys), "none")
        if given.get("http_async_client") is None:
            transport = LoopTransport(secure=not url.startswith("http://"))
            given["http_async_client"] = httpx.AsyncClient(transport=transport)
        return given

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: Any) -> Any:
        """In place of langchain-openai's, which drops or sets the temperature of a model that is called like OpenAI's."""
        return values

    @property
    def _llm_type(self) -> str:
        return "understudy"

    def _resolve_model_profile(self) -> None:
        """None is known. ChatOpenAI takes OpenAI's for a model that has the name of one of theirs."""

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": KEY_VARIABLE}

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return cls.__module__.split(".")

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        written = super().to_json()
        if written["type"] == "constructor":  # langchain-core lets ChatOpenAI's lc_secrets win over ours
            written["kwargs"]["openai_api_key"] = {"lc": 1, "type": "secret", "id": [KEY_VARIABLE]}
        return written

    def get_token_ids(self, text: str) -> list[int]:
        """By `custom_get_token_ids`. tiktoken, which ChatOpenAI downloads, knows nothing of the model's tokenizer."""
        if self.custom_get_token_ids is None:
            raise NotImplementedError(
                f"{self.model_name!r}: its tokenizer is on the server. Pass custom_get_token_ids=tokenizer.encode, count "
                "with langchain_core.messages.utils.count_tokens_approximately, or read an answer's usage_metadata"
            )
        return self.custom_get_token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """The tokens of the messages' text, by `custom_get_token_ids`; the chat template's own are not among them."""
        return BaseChatModel.get_num_tokens_from_messages(self, list(messages), tools)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if payload["stream"] and (payload.get("n") or 1) > 1:
            raise ConfigError(
                f"n={payload['n']}: a stream is one message, several would be mixed; use generate, or n=1"
            )
        messages = self._convert_input(input_).to_messages()
        written: list[Message] = payload["messages"]
        for message, sent in zip(messages, written, strict=True):
            if isinstance(message, AIMessage):
                if sent.get("tool_calls"):
                    sent["tool_calls"] = as_sampled(message, sent["tool_calls"])
                if thought := message.additional_kwargs.get(THOUGHT):
                    sent["reasoning"] = thought
            elif isinstance(message, SystemMessage):  # "developer" when the model is called like one of OpenAI's
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
        result = super()._create_chat_result(response, generation_info)  # pyright: ignore[reportUnknownMemberType]
        plain: dict[str, Any] = response if isinstance(response, dict) else response.model_dump(warnings=False)
        for generation, choice in zip(result.generations, plain["choices"], strict=True):
            self._mark(generation.message, choice)
            note_thought(generation.message, choice["message"])
            calls: list[Message] = choice["message"].get("tool_calls") or []
            if calls:
                raw: dict[str, str] = {call["id"]: call["function"]["arguments"] for call in calls}
                generation.message.additional_kwargs[RAW_ARGUMENTS] = raw
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)  # pyright: ignore[reportUnknownMemberType]
        inner: dict[str, Any] = chunk.get("chunk") or chunk
        choices: list[dict[str, Any]] = inner.get("choices") or []
        if made is not None and choices:
            self._mark(made.message, choices[0])
            note_thought(made.message, choices[0].get("delta") or {})
        return made

    def _mark(self, message: BaseMessage, choice: dict[str, Any]) -> None:
        """Let the message say which recorded call made it."""
        mark = choice.get(MARK)
        if mark:
            message.response_metadata[MARK] = mark
            call_answered(mark["trajectory_id"], mark["call_id"])
            if self._recorded is not None:
                self._recorded(mark["call_id"])

    def _streaming(self, arguments: Mapping[str, Any]) -> ChatUnderstudy:
        """The model whose stream langchain-openai shall read."""
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


def note_thought(message: BaseMessage, answer: Mapping[str, Any]) -> None:
    """Keep the thought of an answer, or of a piece of one, with its message."""
    if thought := answer.get("reasoning") or answer.get("reasoning_content"):
        message.additional_kwargs[THOUGHT] = thought


def as_plain_json(payload: dict[str, Any]) -> dict[str, Any]:
    """Messages and tools moved to `extra_body`, which the SDK sends as it is. As arguments it would walk them through
    their declared types at every call: a third of the client's time in a rollout."""
    moved = {name: payload[name] for name in ("messages", "tools", "response_format") if name in payload}
    kept = {name: value for name, value in payload.items() if name not in moved}
    return {**kept, "messages": [], "extra_body": {**(payload.get("extra_body") or {}), **moved}}


def _parsed_by_sdk(payload: dict[str, Any]) -> bool:
    """Whether langchain-openai shall hand the call to the SDK's `parse`, which reads the answer into the class that is the
    `response_format`, and refuses tools that are not strict: apps on other providers' models have such tools beside a
    JSON schema, and read the answer themselves."""
    if "response_format" not in payload:
        return False
    tools: list[dict[str, Any]] = payload.get("tools") or []
    return isinstance(payload["response_format"], type) or all(tool["function"].get("strict") for tool in tools)


class RawArguments:
    """Adds up the argument text of a stream's tool calls and puts it on the finishing chunk."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._texts: dict[int, str] = {}

    def note(self, chunk: ChatGenerationChunk) -> ChatGenerationChunk:
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
    """The calls in their sampled order and text, as long as the app left the arguments as they were."""
    raw = cast(dict[str, str], message.additional_kwargs.get(RAW_ARGUMENTS, {}))
    order = {call_id: place for place, call_id in enumerate(raw)}
    return sorted(
        (_with_raw_text(call, raw.get(call["id"])) for call in calls),
        key=lambda call: order.get(call["id"], len(order)),
    )


def _with_raw_text(call: Message, raw: str | None) -> Message:
    if raw is None:
        return call
    try:
        if json.loads(raw) != json.loads(call["function"]["arguments"]):
            return call
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": raw}}
