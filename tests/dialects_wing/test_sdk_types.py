"""Requests made of the types of the vendors' SDKs: none is answered 500."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from google.genai import types as google
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel, TypeAdapter

from offbook.testing import Action, scripted_server
from tests.server.http.test_openapi import CASES, ask

if TYPE_CHECKING or find_spec("schemathesis") is not None:
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok

OK = {"description": "Sampled"}


class GeminiBody(BaseModel):
    """The body of `generateContent`, of google-genai's types."""

    contents: list[google.Content]
    systemInstruction: google.Content | None = None
    tools: list[google.Tool] | None = None
    toolConfig: google.ToolConfig | None = None
    generationConfig: google.GenerationConfig | None = None


SDK_TYPES: dict[str, Any] = {
    "/v1/responses": ResponseCreateParamsNonStreaming,
    "/v1/messages": MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": MessageCountTokensParams,
    "/v1beta/models/default:generateContent": GeminiBody,
}


@pytest.mark.slow("requests made from schemas")
@pytest.mark.parametrize("valid", [True, False], ids=["valid", "invalid"])
def test_no_request_of_another_apis_own_types_is_answered_500(
    tmp_path: Path, require: Callable[[bool, str], None], valid: bool
) -> None:
    require(find_spec("schemathesis") is not None, "pip install -r requirements/test.txt")
    schema = schemathesis.openapi.from_dict(_sdk_document())
    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    with scripted_server(lambda _: Action("an answer"), tmp_path) as served:
        schema.config.update(base_url=served.url)
        operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
        assert len(operations) == len(SDK_TYPES)
        sent = sum(ask(operation, mode, [not_a_server_error]) for operation in operations)
        assert sent >= CASES * len(operations)
        assert served.http.get("/health").json()["status"] == "ok"


def _sdk_document() -> dict[str, Any]:
    """An OpenAPI document of the calls in the other APIs, whose bodies are the types of the vendors' SDKs."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for number, (path, body) in enumerate(SDK_TYPES.items()):
        schema = TypeAdapter(body).json_schema(ref_template=f"#/components/schemas/{number}.{{model}}")
        schemas |= {f"{number}.{name}": value for name, value in schema.pop("$defs", {}).items()}
        content = {"application/json": {"schema": schema | {"additionalProperties": False}}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": {"200": OK}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "SDKs", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
