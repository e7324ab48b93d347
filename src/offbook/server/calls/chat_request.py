"""Parses a chat completion request, determines its trajectory, and builds the sampler's payload."""

from __future__ import annotations

import difflib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Self, cast

import orjson
from pydantic import ValidationError

from offbook.base.json_files import DEEPEST, too_deep
from offbook.base.text import CLOSE_NAME
from offbook.base.types import (
    GREEDY_BELOW,
    CallOrigin,
    Json,
    Message,
    Sampling,
    Tool,
    new_id,
)
from offbook.base.wire import (
    IDEMPOTENCY_HEADER,
    LENGTH_HEADER,
    OPEN,
    ORIGIN_HEADER,
    RECORD_HEADER,
    TRAJECTORY_HEADER,
)
from offbook.openai_dialect.chat_fields import (
    CONSTRAINTS,
    GUIDED,
    OURS,
    REFUSED,
    WITHOUT_EFFECT,
    AllowedToolChoice,
    ChatFields,
)

from ...engine.protocol import FLAT_LOGPROBS
from ..errors import ApiError, bad_request, shortened
from ..sampler.transport import AnswerLimits, Quirks

logger = logging.getLogger(__name__)

LENGTHS = frozenset({"max_tokens", "max_completion_tokens"})
_MAX_KEY = 300
MAX_MESSAGES = 20_000
MAX_SHAPE_BYTES = 2**20
"""Limit for the JSON of `tools`, and for every field that becomes a grammar."""
_SHAPES = (
    "tools",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_grammar",
    "guided_regex",
    "guided_choice",
)

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""The values of `reasoning_effort` that vLLM takes."""
SPELLINGS = ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget")
"""Fields of a request: OpenAI's, OpenRouter's, Anthropic's and DeepSeek's, and two of DashScope's."""
_SWITCHES = ("enable_thinking", "thinking")
"""The template's variables for thinking or not, by family."""
_EFFORT = "reasoning_effort"
"""The template's variable for how much, and vLLM's field."""
_BUDGET = "thinking_token_budget"
_VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True)
class ChatRequest:
    """A validated request.

    With `trajectory_id=None` it is answered but not recorded. `fit`: see `LENGTH_HEADER`. A `tool_choice` of allowed tools
    is resolved: `tools` has only those, and `tool_choice` is its mode.
    """

    body: dict[str, Json]
    fields: ChatFields
    trajectory_id: str | None
    idempotency_key: str | None
    origin: CallOrigin | None
    fit: bool = False
    quirks: Quirks = field(default_factory=Quirks)
    size: int = 0  # bytes of the body

    @classmethod
    def parse(
        cls, raw: bytes, headers: Mapping[str, str], url_trajectory: str | None = None, quirks: Quirks | None = None
    ) -> Self:
        """Parse body, headers and base URL. Raises ApiError 400 or 413, naming the field."""
        return cls.of(json_body(raw), headers, url_trajectory, quirks, len(raw))

    @classmethod
    def of(
        cls,
        body: dict[str, Json],
        headers: Mapping[str, str],
        url_trajectory: str | None = None,
        quirks: Quirks | None = None,
        size: int = 0,
    ) -> Self:
        """Parse a body of `size` bytes, headers and base URL. Raises ApiError 400 or 413, naming the field."""
        _known(body)
        _bounded(body, size)
        try:
            fields = ChatFields.model_validate(body)
        except ValidationError as error:
            raise bad_request(error, "body") from error
        body, fields = _narrowed(body, fields)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs needs `logprobs: true`", "top_logprobs", "invalid_value")
        if fields.stream_options is not None and not fields.stream:
            raise ApiError(400, "stream_options needs `stream: true`", "stream_options", "invalid_value")
        key = headers.get(IDEMPOTENCY_HEADER) or None
        if key is not None and len(key) > _MAX_KEY:
            raise ApiError(400, f"{IDEMPOTENCY_HEADER} is longer than {_MAX_KEY} characters", IDEMPOTENCY_HEADER)
        trajectory = _trajectory(fields, headers, url_trajectory, key)
        return cls(body, fields, trajectory, key, _origin(headers), _fit(headers), quirks or Quirks(), size)

    @property
    def model(self) -> str:
        """The model name in the request."""
        return self.fields.model

    @property
    def stream(self) -> bool:
        """Whether the client requested a stream."""
        return bool(self.fields.stream)

    @property
    def choices(self) -> int:
        """The number of requested choices, `n`."""
        return self.fields.choices

    @property
    def recorded(self) -> bool:
        """Whether the call is recorded."""
        return self.trajectory_id is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested logprobs."""
        return bool(self.fields.logprobs)

    @property
    def wants_token_ids(self) -> bool:
        """Whether the client requested token ids."""
        return bool(self.fields.return_token_ids)

    @property
    def wants_usage(self) -> bool:
        """Whether the client requested a final chunk with the usage."""
        return bool(self.fields.stream_options and self.fields.stream_options.include_usage)

    @cached_property
    def limits(self) -> AnswerLimits:
        """The limits that the sampler's answer must keep."""
        fields = self.fields
        lengths = [length for length in (fields.max_tokens, fields.max_completion_tokens) if length is not None]
        return AnswerLimits.of(
            choices=self.choices,
            tokens=max(lengths, default=None),
            top_logprobs=max(fields.top_logprobs or 0, fields.prompt_logprobs or 0, 0),
            request_bytes=self.size,
            recorded=self.recorded,
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as sent."""
        return tuple(self.body["messages"])

    @property
    def tools(self) -> tuple[Tool, ...] | None:
        """The offered tools as sent; None without the field."""
        tools = self.body.get("tools")
        return None if tools is None else tuple(tools)

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling settings as sent. A temperature that engines treat as greedy is 0."""
        sampling = self.fields.sampling
        return sampling if sampling.temperature >= GREEDY_BELOW else sampling.model_copy(update={"temperature": 0.0})

    @cached_property
    def constrained(self) -> str | None:
        """The fields that make recorded logprobs unusable, as text; None if they are usable."""
        fields, reasons = self.fields, list[str]()
        if fields.tool_choice is not None and fields.tool_choice not in ("none", "auto"):
            reasons.append("tool_choice")
        if fields.response_format is not None and fields.response_format.type != "text":
            reasons.append("response_format")
        if self.quirks.grammar_for_strict_tools and fields.tools and fields.tool_choice != "none":
            if fields.parallel_tool_calls is False:
                reasons.append("parallel_tool_calls")
            if any(tool.function.strict for tool in fields.tools):
                reasons.append("tools.strict")
        for name, harmless in CONSTRAINTS.items():
            value = self.body.get(name)
            if value not in (None, [], {}) and value not in harmless:
                reasons.append(name)
        return ", ".join(reasons) or None

    @property
    def allowed_texts(self) -> tuple[str, ...]:
        """The texts of which the answer must be one, if nothing else constrains it; else empty."""
        if self.constrained == "guided_choice":
            return tuple(self.fields.guided_choice or ())
        constraint = cast(
            dict[str, Json], self.body["structured_outputs"] if self.constrained == "structured_outputs" else {}
        )
        kinds = {name for name, value in constraint.items() if value is not None}
        texts = cast(list[Json], constraint["choice"]) if kinds == {"choice"} else []
        return tuple(text for text in texts if isinstance(text, str))

    def with_messages(self, messages: list[Message]) -> Self:
        """The request with other messages of the same form."""
        return replace(self, body=self.body | {"messages": messages})

    def unlimited(self, payload: dict[str, Json]) -> dict[str, Json]:
        """A payload for an answer up to the end of the context."""
        return {name: value for name, value in payload.items() if name not in LENGTHS}

    def as_chat(self, answer: dict[str, Json]) -> dict[str, Json]:
        """The sampler's answer, or a chunk of one, in the form of a chat completion."""
        return answer

    def payload(self, adapter: str, block: int | None = None) -> dict[str, Json]:
        """The sampler's request: the client's JSON with the adapter's name and explicit sampling defaults.

        With `block`, a stream without tools gets so many tokens in a chunk, if the engine can do so. With tools it does not:
        vLLM's tool parsers do not all find the same calls then.
        """
        sent = {name: value for name, value in self.body.items() if name != OURS and name not in WITHOUT_EFFECT}
        sent |= {"model": adapter, "repetition_penalty": self.fields.repetition_penalty or 1.0}
        sent |= dict(self.sampling)
        guided = {name: sent.pop(old) for old, name in GUIDED.items() if sent.get(old) is not None}
        if guided:
            sent["structured_outputs"] = {**(sent.get("structured_outputs") or {}), **guided}
        sent = thinking_in_template(sent, self.quirks.template, budgets=self.quirks.thinking_budgets)
        if self.quirks.no_seed:
            sent.pop("seed", None)
        if self.fields.stream_options is not None:
            # Only OpenAI's own service supports obfuscation.
            sent["stream_options"] = self.fields.stream_options.model_dump(
                exclude={"include_obfuscation"}, exclude_none=True
            )
        if self.recorded:
            top = self.fields.top_logprobs or 0
            sent |= {"return_token_ids": True, "logprobs": True, "top_logprobs": top}
            if self.quirks.flat_logprobs and not self.wants_logprobs:
                sent["vllm_xargs"] = {**(self.fields.vllm_xargs or {}), FLAT_LOGPROBS: 1}
        if block is not None and self.stream and self.quirks.stream_blocks and not self.tools:
            sent["stream_interval"] = block
        return sent


def json_body(raw: bytes) -> dict[str, Json]:
    """The JSON object of a body. Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", None, "invalid_json") from error
    if too_deep(body, raw.count(b"{") + raw.count(b"[")):
        raise ApiError(400, f"the body is nested too deeply: {DEEPEST} levels are the limit", None, "invalid_json")
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shortened(body)}", None, "invalid_json")
    return cast(dict[str, Json], body)


def _known(body: dict[str, Json]) -> None:
    for name in body.keys() - ChatFields.model_fields.keys():
        if name in REFUSED:
            raise ApiError(400, f"{name} is not supported: {REFUSED[name]}", name, "unsupported_field")
        close = difflib.get_close_matches(name, ChatFields.model_fields, 1, CLOSE_NAME)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ApiError(400, f"unknown field {name!r}{hint}", name, "unknown_field")


def _bounded(body: dict[str, Json], size: int) -> None:
    """Reject requests that would block server and engine for too long. Raises ApiError 413."""
    messages = body.get("messages")
    if isinstance(messages, list) and len(cast(list[Json], messages)) > MAX_MESSAGES:
        count = len(cast(list[Json], messages))
        message = f"messages: a call takes at most {MAX_MESSAGES} of them (got {count})"
        raise ApiError(413, message, "messages", "too_large")
    for name in _SHAPES if size > MAX_SHAPE_BYTES else ():
        taken = len(orjson.dumps(body.get(name)))
        if taken > MAX_SHAPE_BYTES:
            raise ApiError(
                413, f"{name} takes {taken} bytes of JSON; the limit is {MAX_SHAPE_BYTES}", name, "too_large"
            )


def _narrowed(body: dict[str, Json], fields: ChatFields) -> tuple[dict[str, Json], ChatFields]:
    """Resolve `allowed_tools`: offer only the allowed tools, and use the choice's mode.

    Engines do not support `allowed_tools`, and the policy must not see tools that it may not call. Raises ApiError for a
    name that is not among the tools.
    """
    choice = fields.tool_choice
    if not isinstance(choice, AllowedToolChoice):
        return body, fields
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    if unknown := sorted(allowed - {tool.function.name for tool in fields.tools or ()}):
        message = f"tool_choice.allowed_tools names {', '.join(map(repr, unknown))}, not among the tools"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    mode = choice.allowed_tools.mode
    tools = [tool for tool in fields.tools or () if tool.function.name in allowed]
    sent = [tool for tool in body["tools"] if tool["function"]["name"] in allowed]
    return body | {"tools": sent, "tool_choice": mode}, fields.model_copy(update={"tools": tools, "tool_choice": mode})


def _trajectory(
    fields: ChatFields, headers: Mapping[str, str], url_trajectory: str | None, key: str | None
) -> str | None:
    """The trajectory that header, body or base URL names; else a new one if recording was requested; else None."""
    named = {
        f"header {TRAJECTORY_HEADER}": headers.get(TRAJECTORY_HEADER) or None,
        "field offbook.trajectory_id": fields.offbook.trajectory_id if fields.offbook is not None else None,
        "base URL": url_trajectory,
    }
    by_place = {place: trajectory for place, trajectory in named.items() if trajectory is not None}
    if len(set(by_place.values())) > 1:
        places = ", ".join(f"{place} {trajectory!r}" for place, trajectory in by_place.items())
        raise ApiError(400, f"the call names several trajectories: {places}", TRAJECTORY_HEADER, "two_trajectories")
    for trajectory in by_place.values():
        if len(trajectory) > 200 or not trajectory.isprintable():
            shown = shortened(trajectory)
            raise ApiError(400, f"a trajectory id has 1 to 200 printable characters, got {shown}", TRAJECTORY_HEADER)
        return trajectory
    record = headers.get(RECORD_HEADER, "0")
    if record not in ("0", "1"):
        raise ApiError(400, f"{RECORD_HEADER} must be 1 or 0, got {shortened(record)}", RECORD_HEADER, "invalid_value")
    if record == "0":
        return None
    # A retry of the same call must find the trajectory that the call opened.
    return f"{OPEN}-{uuid.uuid5(uuid.NAMESPACE_URL, key).hex}" if key is not None else new_id(OPEN)


def _origin(headers: Mapping[str, str]) -> CallOrigin | None:
    raw = headers.get(ORIGIN_HEADER)
    if not raw:
        return None
    try:
        return CallOrigin.model_validate_json(raw)
    except ValidationError as error:
        raise bad_request(error, ORIGIN_HEADER) from error


def _fit(headers: Mapping[str, str]) -> bool:
    value = headers.get(LENGTH_HEADER)
    if value not in (None, "fit"):
        raise ApiError(400, f"{LENGTH_HEADER} must be fit, got {shortened(value)}", LENGTH_HEADER, "invalid_value")
    return value is not None


def thinking_in_template(
    payload: dict[str, Json], template: frozenset[str] | None, *, budgets: bool
) -> dict[str, Json]:
    """The payload with its thinking options as far as the template has variables for them. Others are dropped and logged once: a
    program that was written for a model that thinks must not end on them.

    `template`: the words of the base's chat templates; None if they are not known, so that all variables are sent.
    `budgets`: whether the engine ends a thought after `thinking_token_budget` tokens.
    """
    own = cast(dict[str, Json], payload.get(_VARIABLES) or {})
    options = {name: payload[name] for name in SPELLINGS if payload.get(name) is not None}
    dropped = [_BUDGET] if payload.get(_BUDGET) is not None and not budgets else []
    switched = [name for name in _SWITCHES if name in own]
    if not (options or dropped or switched):
        return payload
    sent = {name: value for name, value in payload.items() if name not in SPELLINGS and name not in dropped}
    known = {
        name: value for name, value in _thinking_variables(options, own).items() if template is None or name in template
    }
    if not known:
        dropped += [*options, *switched]
    for name in dropped:
        _note_dropped(name)
    if known | own:
        sent[_VARIABLES] = known | own
    if known.get(_EFFORT) is not None:
        sent[_EFFORT] = known[_EFFORT]
    if _fields(options, "reasoning").get("exclude") is True:
        sent.setdefault("include_reasoning", False)
    return sent


def _thinking_variables(options: Mapping[str, Json], own: Mapping[str, Json]) -> dict[str, Json]:
    """The template's variables that the options mean. The client's own variables go first."""
    effort = options.get("reasoning_effort") or _fields(options, "reasoning").get("effort")
    effort = effort if isinstance(effort, str) and effort in EFFORTS else None
    kind, budget = _fields(options, "thinking").get("type"), options.get("thinking_budget")
    spoken: list[Json] = [
        *(own.get(name) for name in _SWITCHES),
        options.get("enable_thinking"),
        options.get("thinking") if kind is None else kind != "disabled",
        None if budget is None else budget != 0,
        _fields(options, "reasoning").get("enabled"),
        None if effort is None else effort != "none",
    ]
    on = next((value for value in spoken if isinstance(value, bool)), None)
    return (dict.fromkeys(_SWITCHES, on) if on is not None else {}) | ({_EFFORT: effort} if effort else {})


def _fields(options: Mapping[str, Json], name: str) -> dict[str, Json]:
    value = options.get(name)
    return cast(dict[str, Json], value) if isinstance(value, dict) else {}


@cache
def _note_dropped(name: str) -> None:
    logger.warning("%s has no effect: neither the base's chat template nor its engine has such an option", name)
