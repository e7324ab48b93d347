"""The fields of a chat completion request, OpenAI's and vLLM's, with their types and their treatment.

Types are checked strictly, without coercion. The sampler is sent the client's own JSON, so the order of keys does not
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbook.base.config import MAX_TEMPERATURE
from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message, Sampling

Object = dict[str, Json]
Id = Annotated[str, Field(min_length=1, max_length=200)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class FunctionCall(_Checked):
    """The function and arguments of a tool call."""

    name: str = Field(min_length=1)
    arguments: str | Object | None = None


class MessageToolCall(_Checked):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(_Checked):
    """A part of a message's content; its other fields are passed on unchecked."""

    type: str


class ChatMessage(_Checked):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(_Checked):
    """The name, description and JSON schema of a tool."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class ChatTool(_Checked):
    """A tool offered to the model."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(_Checked):
    """A function by name."""

    name: str = Field(min_length=1)


class NamedTool(_Checked):
    """A tool choice that forces one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(_Checked):
    """The tools that a call may use, and whether it must use one."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(_Checked):
    """A tool choice that offers only some of `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ResponseFormat(_Checked):
    """The format of the answer; its schema is passed on unchecked."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Named(BaseModel):
    """The body field `offbook`, which names the call's trajectory."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    trajectory_id: Id


class SampledFields(BaseModel):
    """The fields that every engine implements. None, or null: the default of OpenAI's API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    include_reasoning: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        """The number of choices, `n`."""
        return self.n or 1

    @property
    def sampling(self) -> Sampling:
        """The sampling settings, those that are left out off, regardless of the base model's generation_config."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
        )


class _Conversation(_Checked):
    """What is said, and the form of the answer."""

    model: str = Field(min_length=1)
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


class ChatFields(SampledFields, _Conversation):
    """A chat completion request. Fields of OpenAI's or vLLM's API that are not listed here are rejected."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    offbook: Named | None = None

    length_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Object | None = None
    guided_json: str | Object | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    logits_processors: list[Json] | None = None
    thinking_token_budget: int | None = None
    use_beam_search: bool | None = None
    vllm_xargs: Object | None = None

    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[Object] | None = None
    chat_template: str | None = None
    mm_processor_kwargs: Object | None = None
    media_io_kwargs: Object | None = None
    reasoning_effort: str | None = None
    reasoning: Object | None = None
    thinking: Object | bool | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: Object | None = None

    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Object | None = None
    prediction: Object | None = None
    verbosity: str | None = None
    moderation: Object | None = None
    modalities: list[Literal["text"]] | None = None


OURS = "offbook"
"""The field that the gateway reads and does not send to the sampler."""

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields of earlier vLLM versions, which the current one silently ignores -> their names in `structured_outputs`."""

WITHOUT_EFFECT = frozenset(
    {
        "store",
        "metadata",
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "verbosity",
        "moderation",
        "modalities",
    }
)
"""Fields that concern OpenAI's own service: accepted, but not sent to the sampler."""

REFUSED = {
    "functions": "functions were replaced by `tools`",
    "function_call": "function_call was replaced by `tool_choice`",
    "audio": "this endpoint answers with text only",
    "web_search_options": "this endpoint cannot search the web; offer a tool instead",
}

CONSTRAINTS = {
    "logit_bias": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}
"""Fields that make the recorded logprobs differ from the policy's, with the values that have no effect."""


def in_order_of_calls(messages: Sequence[Message], *, answered: bool = False) -> list[Message]:
    """The messages, with each run of results in the order of the calls that it answers. `answered`: the last calls need
    their results too.

    Raises ConfigError for a result without a call, a second one, and a call without a result, naming field and id.

    >>> call = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    >>> first, second = ({"role": "tool", "tool_call_id": name} for name in "ab")
    >>> in_order_of_calls([call, second, first]) == [call, first, second]
    True
    """
    ordered: list[Message] = []
    run = _Run()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message["role"] == "tool":
            run.add(message, where)
            continue
        if run.waiting:
            raise ConfigError(f"{where}: the {message['role']} speaks before {run.missing} has a result")
        ordered += run.results
        run = _Run(message, where)
        ordered.append(message)
    if answered and run.waiting:
        raise ConfigError(
            f"messages: the conversation ends before {run.missing} has a result: send a message of the role `tool` for "
            "each call"
        )
    return ordered + run.results


class _Run:
    """The results after a message, by the calls in it. Calls and results without ids belong together in their order."""

    def __init__(self, message: Message | None = None, where: str = "") -> None:
        calls: list[Json] = (message or {}).get("tool_calls") or []
        if message is not None and calls and message["role"] != "assistant":
            raise ConfigError(f"{where}.tool_calls: only the assistant calls tools, this one is {message['role']!r}")
        self._results: list[Message | None] = [None] * len(calls)
        self.waiting: dict[str | None, list[int]] = {}
        """Places of the calls without a result, by id, the first one last."""
        for place in reversed(range(len(calls))):
            call_id = _text(calls[place].get("id"))
            if call_id is not None and call_id in self.waiting:
                raise ConfigError(f"{where}.tool_calls: the id {call_id!r} appears twice")
            self.waiting.setdefault(call_id, []).append(place)
        self._ids = frozenset(self.waiting)

    @property
    def results(self) -> list[Message]:
        """The results in the order of their calls."""
        return [result for result in self._results if result is not None]

    @property
    def missing(self) -> str:
        """The first call without a result, for an error."""
        call_id = min(self.waiting, key=lambda name: self.waiting[name][-1])
        return "each call of the assistant" if call_id is None else f"call {call_id!r} of the assistant"

    def add(self, result: Message, where: str) -> None:
        """Add a result. Raises ConfigError if no call waits for it."""
        call_id = _text(result.get("tool_call_id"))
        if not self._results:
            raise ConfigError(f"{where}: a result of a tool, but no call of the assistant before it waits for one")
        if call_id not in self.waiting:
            if call_id is not None and call_id in self._ids:
                raise ConfigError(f"{where}.tool_call_id: call {call_id!r} has a result already")
            names = ", ".join(map(repr, sorted(self.waiting, key=str)[:_MOST_NAMED])) or "each has one"
            raise ConfigError(f"{where}.tool_call_id: {call_id!r} is none of the calls that wait for a result: {names}")
        places = self.waiting[call_id]
        self._results[places.pop()] = result
        if not places:
            del self.waiting[call_id]


_MOST_NAMED = 10


def _text(call_id: Json) -> str | None:
    return None if call_id is None else str(call_id)
