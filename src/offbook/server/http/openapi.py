"""`GET /openapi.json`: the API as OpenAPI 3.1, generated from the types that the handlers use."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from typing import cast

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import offbook
from offbook.base.types import Json
from offbook.base.wire import FinishRequest, TrainEvent
from offbook.openai_dialect.chat_answer import ChatCompletion, ErrorAnswer
from offbook.openai_dialect.chat_fields import ChatFields

OPENAPI = "/openapi.json"
PROGRAMS = ("/v1/", "/t/", "/m/", "/api/", "/health")
"""Path prefixes of the documented routes. Pages and the requests that they send are left out."""
REFERENCE = "#/components/schemas/{model}"
Object = dict[str, Json]


READ_BY_HAND = (FinishRequest, TrainEvent, ChatFields, ChatCompletion, ErrorAnswer)
"""Types of bodies that are parsed or written without FastAPI."""


def add_openapi(app: FastAPI) -> None:
    """Serve the OpenAPI document of the application's routes. It needs the key, like every route."""

    @cache
    def described() -> Object:
        return description([route for route in app.routes if isinstance(route, APIRoute)])

    async def openapi() -> Object:
        return await asyncio.to_thread(described)  # building it the first time takes long

    app.add_api_route(OPENAPI, openapi, methods=["GET"], include_in_schema=False)


def description(routes: list[APIRoute]) -> Object:
    """Build the OpenAPI document of the routes for programs, and of the calls, which are no FastAPI route."""
    described = [route for route in routes if route.path_format.startswith(PROGRAMS)]
    document: Object = get_openapi(
        title="Offbook", version=offbook.__version__, routes=described, separate_input_output_schemas=False
    )
    _, definitions = models_json_schema([(model, "validation") for model in READ_BY_HAND], ref_template=REFERENCE)
    schemas = cast(Object, document.setdefault("components", {}).setdefault("schemas", {}))
    schemas |= cast(Object, definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # all errors use ErrorAnswer instead
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    paths = cast(dict[str, dict[str, Object]], document["paths"])
    for number, place in enumerate(("", "/t/{trajectory_id}")):
        paths[f"{place}/v1/chat/completions"] = {"post": _chat_completion(number)}
    paths["/api/trajectories"]["post"]["requestBody"] = _body(FinishRequest)
    for path, operations in paths.items():
        for operation in operations.values():
            _declare(operation, re.findall(r"{(\w+)}", path))
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _answer("Refused, or failed", "application/json", ErrorAnswer)
    return document


def _declare(operation: Object, names: list[str]) -> None:
    known = cast(list[Object], operation.setdefault("parameters", []))
    declared = {parameter["name"] for parameter in known if parameter["in"] == "path"}
    text = {"type": "string", "minLength": 1, "maxLength": 200}
    known += [{"name": n, "in": "path", "required": True, "schema": text} for n in names if n not in declared]


def _chat_completion(number: int) -> Object:
    answer = _answer("Sampled and recorded", "application/json", ChatCompletion)
    answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": "Chat Completion",
        "operationId": f"chat_completion_{number}",
        "requestBody": _body(ChatFields),
        "responses": {"200": answer},
    }


def _body(model: type[BaseModel]) -> Object:
    return {"required": True, "content": {"application/json": {"schema": _reference(model)}}}


def _answer(meaning: str, kind: str, model: type[BaseModel]) -> Object:
    return {"description": meaning, "content": {kind: {"schema": _reference(model)}}}


def _reference(model: type[BaseModel]) -> Object:
    return {"$ref": REFERENCE.format(model=model.__name__)}
