"""Parses requests in vLLM's dialect of OpenAI's chat API, and defines its errors.

Fields that this engine does not support are rejected by name. Fields that do not affect sampling are accepted.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, field_validator

from offbook.base.types import Json, Message, Tool
from offbook.openai_dialect.chat_answer import DEFAULT_TOKENS, OF_CHATS, error_body
from offbook.openai_dialect.chat_fields import NamedTool, SampledFields

BAD_REQUEST = "BadRequestError"
NOT_FOUND = "NotFoundError"
INTERNAL = "InternalServerError"

_WITHOUT_EFFECT = frozenset(
    [
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "request_id",
        "priority",
        "cache_salt",
        "spaces_between_special_tokens",
        "stream_interval",
        "vllm_xargs",
    ]
)
"""Fields that are accepted and ignored, because they do not affect sampling, are for vLLM, or stand in `chat_template_kwargs` too."""
_MAX_LOGPROBS = 20
_VALUE_SHOWN = 100  # characters of a value in an error message


class DialectError(Exception):
    """An error that is answered in OpenAI's format, with vLLM's types and codes. `param` names the invalid field."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code or status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Json]:
        """The error as JSON."""
        return error_body(str(self), self.kind, self.param, self.code)


def shortened(value: Json) -> str:
    """A value for an error message, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= _VALUE_SHOWN else f"{text[:_VALUE_SHOWN]}..."


class Part(BaseModel):
    """A part of a request. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamingOptions(Part):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class JsonSchema(Part):
    """The schema of a JSON answer."""

    name: str = "answer"
    description: str | None = None
    schema_: Json = Field(None, alias="schema")
    strict: bool | None = None


class AnswerFormat(Part):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """vLLM's field for further formats. Only a choice of texts is supported."""

    choice: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


class SamplingRequest(SampledFields):
    """What requests for chat completions and for completions share."""

    model: str
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[int, Annotated[FiniteFloat, Field(ge=-100, le=100)]] = Field(default_factory=dict[int, float])
    stream_options: StreamingOptions | None = None

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @property
    def prompt_field(self) -> str:
        """The field that is the prompt."""
        return "messages"

    @property
    def skips_special(self) -> bool:
        """Whether special tokens leave no text."""
        return self.skip_special_tokens is not False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatCompletionRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: AnswerFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def shaped(self) -> bool:
        """Whether a grammar restricts the answer from its first token."""
        free = self.response_format is None or self.response_format.type == "text"
        return not free or self.tool_choice not in (None, "auto", "none")

    @property
    def most_calls(self) -> int | None:
        """How many tool calls the answer may have; None for no limit."""
        return 1 if self.parallel_tool_calls is False else None


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions: a prompt that no template changes. Its `logprobs` are read as those of a chat."""

    prompt: str | list[Annotated[int, Field(ge=0)]]
    add_special_tokens: bool = True

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, prompt: str | list[int]) -> str | list[int]:
        if not prompt:
            raise ValueError("a prompt has at least one token")
        return prompt

    @property
    def prompt_field(self) -> str:
        """The field that is the prompt."""
        return "prompt"


class LoadAdapter(Part):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapter(Part):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


M = TypeVar("M", bound=BaseModel)
_OBJECT: TypeAdapter[dict[str, Json]] = TypeAdapter(dict[str, Json])


def read_object(body: bytes, keep: str | None = None) -> dict[str, Json]:
    """Parse a JSON object, and remove fields that are null, but for `keep`. Raises DialectError."""
    try:
        fields = _OBJECT.validate_json(body)
    except ValidationError as error:
        raise DialectError(f"the body is not a JSON object: {error.errors(include_url=False)[0]['msg']}") from error
    return {name: value for name, value in fields.items() if value is not None or name == keep}


def read_chat(body: bytes) -> ChatCompletionRequest:
    """Parse a chat request. Raises DialectError, which names the first invalid field."""
    fields = {name: value for name, value in read_object(body).items() if name not in _WITHOUT_EFFECT}
    request = checked(ChatCompletionRequest, fields)
    _check_stream(request)
    if request.top_logprobs and not request.logprobs:
        raise DialectError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.add_generation_prompt and request.continue_final_message and "add_generation_prompt" in fields:
        raise DialectError(
            "continue_final_message and add_generation_prompt exclude each other: set one of them",
            param="continue_final_message",
        )
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """Parse a request for a completion of a prompt. Raises DialectError, which names the first invalid field.

    Without `max_tokens` it has 16; with null, as many as the context allows, as in vLLM.
    """
    fields = {name: value for name, value in read_object(body, "max_tokens").items() if name not in _WITHOUT_EFFECT}
    for name in OF_CHATS & fields.keys():
        raise DialectError(f"{name} is a field of chat completions: leave it out", param=name)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt := cast(list[Json], prompt)) == 1 and isinstance(prompt[0], str | list):
        fields["prompt"] = prompt[0]
    if "logprobs" in fields:
        count = fields["logprobs"]
        if type(count) is not int or not 0 <= count <= _MAX_LOGPROBS:
            raise DialectError(
                f"logprobs: a number of 0 to {_MAX_LOGPROBS} is needed (got {shortened(count)})", param="logprobs"
            )
        fields |= {"logprobs": True, "top_logprobs": count}
    request = checked(CompletionRequest, {"max_tokens": DEFAULT_TOKENS, **fields})
    _check_stream(request)
    return request


def _check_stream(request: SamplingRequest) -> None:
    if request.stream_options and not request.stream:
        raise DialectError("stream_options needs stream=true", param="stream_options")


def checked(model: type[M], fields: dict[str, Json]) -> M:
    """Validate a body. Raises DialectError, which names the first invalid field, its value, and what is allowed."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = [str(part) for part in fault["loc"]]
        field = ".".join(where) or "(whole)"
        if fault["type"] == "extra_forbidden":
            message = f"{field} is not supported by the embedded engine: leave it out"
        else:
            message = f"{field}: {fault['msg']} (got {shortened(fault['input'])})"
        raise DialectError(message, param=where[0] if where else None) from error
