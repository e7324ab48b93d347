"""The fields of Gemini's `generateContent`, in camelCase or snake_case as its JSON allows.

Fields that are not listed are kept in `model_extra`, and are refused by name where they are read.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from offbook.base.types import Json

Object = dict[str, Json]
T = TypeVar("T")


def _listed(value: Json) -> Json:
    return [value] if isinstance(value, dict) else value


Listed = Annotated[list[T], BeforeValidator(_listed)]
"""A list, for which Google's API accepts a single object too."""


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class _Google(BaseModel):
    """An object of Google's JSON. Numbers may be text, as protobuf writes 64-bit integers."""

    model_config = ConfigDict(extra="allow", frozen=True, alias_generator=to_camel, populate_by_name=True)


class GeminiCall(_Google):
    """A function call. Most clients send it back without `id`."""

    id: str | None = None
    name: str = Field(min_length=1)
    args: Object | None = None


class GeminiBlob(_Google):
    """Bytes in base64, of either alphabet."""

    mime_type: str
    data: str


class GeminiResultPart(_Google):
    """A part of a function's result, such as an image."""

    inline_data: GeminiBlob | None = None


class GeminiResult(_Google):
    """The result of a function call. Without `id` it belongs to the first open call of that name."""

    id: str | None = None
    name: str = Field(min_length=1)
    response: Object | None = None
    parts: Listed[GeminiResultPart] = Field(default_factory=list[GeminiResultPart])


class GeminiPart(_Google):
    """A part of a turn: one of text, a function call, its result, or inline data."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: GeminiCall | None = None
    function_response: GeminiResult | None = None
    inline_data: GeminiBlob | None = None
    part_metadata: Object | None = None
    video_metadata: Object | None = None
    media_resolution: Json = None


class GeminiContent(_Google):
    """A turn of the conversation. `function` is an earlier name of the role that sends results."""

    role: Literal["user", "model", "function", "system"] | None = None
    parts: Listed[GeminiPart] = Field(default_factory=list[GeminiPart])


class GeminiFunction(_Google):
    """A function that the model may call. `parameters` is OpenAPI's form of a schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Object | None = None
    parameters_json_schema: Object | None = None
    behavior: str | None = None
    response: Json = None
    response_json_schema: Json = None


class GeminiTool(_Google):
    """Functions that are offered. Any other field is a tool that runs at Google."""

    function_declarations: Listed[GeminiFunction] | None = None


class GeminiCalling(_Google):
    """Whether and which functions must be called."""

    mode: Annotated[Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"], BeforeValidator(_upper)] = "AUTO"
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: bool | None = None


class GeminiToolConfig(_Google):
    """The options of `tools`."""

    function_calling_config: GeminiCalling | None = None


class GeminiThinking(_Google):
    """Whether the model thinks, and whether its thoughts are shown."""

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GeminiConfig(_Google):
    """The settings of a call."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    candidate_count: int | None = None
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] | None = None
    response_schema: Object | None = None
    response_json_schema: Json = None
    thinking_config: GeminiThinking | None = None
    response_modalities: list[Annotated[Literal["TEXT"], BeforeValidator(_upper)]] | None = None
    media_resolution: Json = None


class GenerateContent(_Google):
    """The body of `generateContent` and `streamGenerateContent`. The model is in the path."""

    contents: Listed[GeminiContent] = Field(min_length=1)
    system_instruction: GeminiContent | None = None
    tools: Listed[GeminiTool] | None = None
    tool_config: GeminiToolConfig | None = None
    generation_config: GeminiConfig | None = None
    model: str | None = None
    safety_settings: Json = None
    labels: Json = None
    store: Json = None
    service_tier: Json = None


class CountTokens(_Google):
    """The body of `countTokens`: turns alone, or a whole request."""

    contents: Listed[GeminiContent] | None = None
    generate_content_request: GenerateContent | None = None
    model: str | None = None
