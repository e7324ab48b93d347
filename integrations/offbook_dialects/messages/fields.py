"""The fields of Anthropic's Messages API: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbook.base.types import Json


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Text(_Part):
    """Text."""

    type: Literal["text"]
    text: str


class Source(_Part):
    """The source of an image."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Image(_Part):
    """An image."""

    type: Literal["image"]
    source: Source


class ToolReference(_Part):
    """The name of a deferred tool that a search found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(_Part):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[Text | Image | ToolReference, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class ToolUseBlock(_Part):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Json]


class Thinking(_Part):
    """A thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(_Part):
    """A thought of another model, which nobody here can read."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Text | Image | ToolResultBlock | ToolUseBlock | Thinking | RedactedThinking, Field(discriminator="type")
]


class Turn(_Part):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(_Part):
    """A tool. Those without `input_schema` are Anthropic's own; sets of them have no name."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Json] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(_Part):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(_Part):
    """Whether the model thinks. Its budget is not kept."""

    type: str


class OutputFormat(_Part):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Json] = Field(alias="schema")


class OutputConfig(_Part):
    """The form of the answer, and how much the model thinks."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(_Part):
    """A request for an answer, or for the number of tokens of its prompt."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


WITHOUT_EFFECT = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
    }
)
"""Fields that concern Anthropic's own service."""
REFUSED = {
    "container": "nothing is executed here; offer a tool instead",
    "thread": "no conversation is kept here; send all of its messages",
    "mcp_servers": "the endpoint calls no tools; let the client connect to the MCP server",
}
NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a refused `thread`: its SDK's tool runner then sends all messages itself."""
