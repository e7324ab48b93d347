"""Converts other providers' tools, options and formats to OpenAI's, and picks the settings that a replacement keeps.

Temperature, top-p, top-k and seed are left out: they belong to the training.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from offbook.base.errors import CaptureError

logger = logging.getLogger("offbook")

Fields: TypeAlias = dict[str, Any]
Choice: TypeAlias = str | bool | Mapping[str, Any]

SAMPLING = frozenset({"temperature", "seed", "top_p", "top_k", "min_p"})
"""The app's sampling options. During a capture the training decides them."""
PROVIDER_ONLY = frozenset(
    {
        # of the app's own endpoint
        "model",
        "model_name",
        "stream_usage",
        "timeout",
        "extra_headers",
        "extra_query",
        # of the services of Anthropic, Google, Amazon and Ollama, and of OpenAI's Responses API
        "betas",
        "cache_control",
        "inference_geo",
        "performance_config",
        "include",
        "keep_alive",
    }
)
"""Keyword arguments without effect on what is sampled. They are dropped."""
DROPPED = frozenset(
    {
        *("logit_bias", "stop_token_ids", "allowed_token_ids"),  # ids of another tokenizer
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "repeat_penalty", "length_penalty"),
        *("mirostat", "tfs_z"),  # as penalties: the logprobs would no longer be the policy's
        *("thinking", "thinking_budget", "thinking_config", "thinking_level", "include_thoughts"),
        *("reasoning", "reasoning_effort", "reasoning_format"),  # the trained model's chat template decides
        *("context_management", "truncation"),  # shorten the conversation at the provider
        *("safety_settings", "guardrail_config", "guardrails", "safe_mode", "safe_prompt"),
        *("extra_body", "additional_model_request_fields"),
    }
)
"""Options that change what the app's own model samples, and that the trained model cannot have. Each is dropped with a warning."""
NEUTRAL = {"repetition_penalty": 1, "repeat_penalty": 1, "length_penalty": 1, "tfs_z": 1}
"""Values of these options that change nothing. For the others it is 0, or nothing."""
SAME = {
    "stop_sequences": "stop",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "num_predict": "max_tokens",
}
"""Other providers' names of OpenAI's options."""
FORMATS = ("output_config", "output_format", "response_json_schema", "response_schema", "response_mime_type", "format")
"""Other providers' names of a response format."""
NOT_TEXT = frozenset(
    {"image", "image_url", "input_image", "audio", "input_audio", "video", "media", "file", "input_file"}
)
"""Types of content blocks, under all providers' names, that the trained model cannot read."""
PROVIDER_STATE = {
    "previous_response_id": "the earlier messages are kept at OpenAI; send them with the call (use_previous_response_id=False)",
    "conversation": "the earlier messages are kept at OpenAI; send them with the call",
    "cached_content": "a part of the prompt is kept at Google; send it with the call",
    "mcp_servers": "Anthropic's service runs these tools; give the agent MCP tools of its own (`offbook_mcp.mcp_tools`)",
}
"""Arguments that refer to state or tools at the provider's service, with what to do instead. They cannot be redirected."""


def to_openai(arguments: Mapping[str, Any], kind: str = "the app's chat model") -> Fields:
    """Convert the keyword arguments of a call on the original model, whose class is `kind`.

    Raises CaptureError for a feature that only the provider's service has, such as its own web search.
    """
    for name, alternative in PROVIDER_STATE.items():
        if arguments.get(name):
            raise CaptureError(f"{name} cannot be redirected to the trained model: {alternative}")
    kept = {name: value for name, value in arguments.items() if name not in PROVIDER_ONLY | SAMPLING}
    for name in DROPPED & kept.keys():
        if (value := kept.pop(name)) and value != NEUTRAL.get(name):
            warn_dropped(kind, name)
    wanted = _taken_format(kept)
    if wanted is not None:
        kept["response_format"] = wanted
    for theirs, ours in SAME.items():
        value = kept.pop(theirs, None)
        if value is not None and not kept.get(ours):
            kept[ours] = value
    if (kept.get("max_tokens") or 0) < 0:
        del kept["max_tokens"]  # Ollama's value for no limit
    if kept.get("tools"):
        kept["tools"] = [to_openai_tool(tool) for tool in kept["tools"] if not _is_cache_point(tool)]
    choice: Choice | None = kept.pop("tool_choice", None)
    if choice is not None:
        if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
            kept["parallel_tool_calls"] = False
        kept["tool_choice"] = to_openai_choice(choice)
    return kept


@functools.cache  # the option is the same in each rollout
def warn_dropped(kind: str, option: str) -> None:
    """Warn, once a process, that an option of the app's chat model is not passed on."""
    logger.warning("%s of %s is not passed on to the trained model: it was made for the app's own model", option, kind)


def check_text(messages: Sequence[BaseMessage]) -> None:
    """Raise CaptureError for a content block that is not text, naming the message and the block."""
    for index, message in enumerate(messages):
        blocks: object = message.content
        for block_index, block in enumerate(cast(list[object], blocks) if isinstance(blocks, list) else []):
            kind = cast(Fields, block).get("type") if isinstance(block, dict) else None
            if kind in NOT_TEXT:
                raise CaptureError(
                    f"messages[{index}].content[{block_index}]: a block of type {kind!r} in a {message.type} message, and the trained "
                    "model reads text only: put what it shows into words, or leave this call to the app's own model (exclude=)"
                )


def openai_tools(tools: Sequence[Any]) -> list[Fields]:
    """Convert tools for a recorded call. Tools that the provider runs itself have no OpenAI form and are left out."""
    return [converted for tool in tools if (converted := _function_tool(tool)) is not None]


def to_openai_tool(tool: Any) -> Fields:
    """Convert one tool. Raises CaptureError for a tool that the provider runs itself."""
    converted = _function_tool(tool)
    if converted is None:
        kind = tool.get("type") or next(iter(tool), None)
        raise CaptureError(
            f"the tool {kind!r} is run by the provider's own service, so the trained model cannot have it: give the agent "
            f"a tool of its own that does the same, or leave this call out of the capture (exclude=). Got {tool!r:.200}"
        )
    return converted


def _function_tool(tool: Any) -> Fields | None:
    """Convert a tool that the app runs, with a schema of its arguments; None for any other tool."""
    if not isinstance(tool, Mapping):
        return convert_to_openai_tool(tool)
    fields = cast(Mapping[str, Any], tool)
    if isinstance(fields.get("function"), Mapping):
        return dict(fields)
    if fields.get("type") == "function":  # of the Responses API
        return {"type": "function", "function": {name: value for name, value in fields.items() if name != "type"}}
    known = {"input_schema", "toolSpec", "parameters", "properties", "title"} & fields.keys()
    if not known and (set(fields) - {"name", "description"} or "name" not in fields):
        return None
    converted = convert_to_openai_tool(dict(fields))
    if fields.get("strict") is not None:  # of Anthropic's
        converted["function"]["strict"] = fields["strict"]
    return converted


def _is_cache_point(tool: Any) -> bool:
    return isinstance(tool, Mapping) and "cachePoint" in tool


def to_openai_choice(choice: Choice) -> str | Fields:
    """Convert a tool choice to `required`, `auto`, `none` or a named function.

    Accepts booleans, words, a bare tool name, and the dicts of Anthropic, Amazon and the Responses API. Raises CaptureError
    for a tool of the provider's service.
    """
    if isinstance(choice, Mapping):
        return _choice_of_mapping(choice)
    if choice is True:
        return "required"
    if choice is False:
        return "none"
    word = choice.lower()
    if word in ("auto", "none", "required", "any"):
        return "required" if word == "any" else word
    return _named(choice)


def _choice_of_mapping(choice: Mapping[str, Any]) -> str | Fields:
    kind = choice.get("type")
    if kind in ("auto", "any", "none"):
        return to_openai_choice(str(kind))
    if kind == "tool" or (kind == "function" and "name" in choice):
        return _named(choice["name"])
    if kind is None and len(choice) == 1:  # {"any": {}}, {"tool": {"name": ...}}
        word, inner = next(iter(choice.items()))
        return _named(inner["name"]) if word == "tool" else to_openai_choice(word)
    if kind != "function":
        raise CaptureError(
            f"tool_choice={dict(choice)!r} names a tool that only the provider's own service can run: give the agent a tool of "
            "its own, or leave this call out of the capture (exclude=)"
        )
    return dict(choice)


def _named(name: str) -> Fields:
    return {"type": "function", "function": {"name": name}}


def _taken_format(kept: Fields) -> Fields | None:
    """Remove another provider's response format from `kept` and return it in OpenAI's form; None if there is none."""
    taken: Fields | None = None
    config: Mapping[str, Any] = kept.pop("output_config", None) or {}
    if form := config.get("format") or kept.pop("output_format", None):  # Anthropic
        taken = _schema_format(form["schema"])
    elif form := config.get("textFormat"):  # Amazon
        inner = form["structure"]["jsonSchema"]
        taken = _schema_format(json.loads(inner["schema"]), inner.get("name"))
    schema = kept.pop("response_json_schema", None) or kept.pop("response_schema", None)  # Google
    if kept.pop("response_mime_type", None) == "application/json":
        taken = _schema_format(schema) if schema else {"type": "json_object"}
    if form := kept.pop("format", None):  # Ollama
        taken = {"type": "json_object"} if form == "json" else _schema_format(form)
    text: Mapping[str, Any] = kept.pop("text", None) or {}
    if form := text.get("format"):  # the Responses API
        taken = _schema_format(form["schema"], form.get("name")) if form["type"] == "json_schema" else dict(form)
    return taken


def _schema_format(schema: Mapping[str, Any], name: str | None = None) -> Fields:
    inner = {"name": name or str(schema.get("title") or "answer"), "schema": dict(schema)}
    return {"type": "json_schema", "json_schema": inner}


OURS = ("stop", "max_tokens", "n", "logprobs", "top_logprobs")
"""Fields of our chat model. What the app's model has under other names becomes `model_kwargs`."""
LANGCHAINS = ("callbacks", "tags", "metadata", "verbose", "disable_streaming")
"""Fields of every chat model that LangChain uses itself. The rate limiter is left out: it protects the other endpoint."""


def kept_settings(original: BaseChatModel) -> dict[str, Any]:
    """The fields of `original` that its replacement keeps, as if they were given at the call.

    Raises CaptureError for one that refers to the provider's service, such as a part of the prompt that is kept there.
    """
    options = {name: value for name in _options_of(type(original)) if (value := getattr(original, name)) is not None}
    extra: object = getattr(original, "model_kwargs", None)
    if isinstance(extra, dict):
        options |= cast(dict[str, Any], extra)
    converted = to_openai(options, type(original).__name__)
    kept: dict[str, Any] = {name: getattr(original, name) for name in LANGCHAINS}
    kept |= {name: converted.pop(name) for name in OURS if name in converted}
    if converted:
        kept["model_kwargs"] = converted
    if "streaming" in original.model_fields_set:
        kept["streaming"] = getattr(original, "streaming", False)
    if getattr(original, "output_version", None) == "v1":
        kept["output_version"] = "v1"
    return kept


@functools.cache
def _options_of(kind: type[BaseChatModel]) -> tuple[str, ...]:
    return tuple(name for name in (*OURS, *SAME, *FORMATS, *DROPPED, *PROVIDER_STATE) if name in kind.model_fields)
