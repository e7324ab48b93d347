"""Every route of every HTTP listener is found in its application and gets mutated requests: none is answered 500.

A route that needs a body, and an API or a listener whose paths no route table shows, joins the tables here: a test fails
until it does.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from starlette.routing import Mount, Route

from offbook.http_listener.access_checks import AccessChecks
from offbook.server.http import app, model_paths
from offbook.server.http.auth import Guard
from offbook.testing.asgi import serving
from offbook_mcp.commands.serve import ToolEndpoint
from offbook_mcp.errors import McpServerError
from offbook_mcp.training.agent_loop import LoopOptions
from offbook_production import passing
from tests.fakes.gateway import gateway_over
from tests.fakes.scripted_sampler import scripted_sampler
from tests.server.http.test_wire_values import INTEGERS, NUMBERS, TEXTS, nested

from .test_all_listeners import LISTENERS, UNUSED, application

CASES = int(os.environ.get("OFFBOOK_TEST_API_CASES", "2"))
"""Mutated requests to each route."""
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "default", "messages": HI, "max_tokens": 4}
KNOWN = {"name": "default", "model": "default", "trajectory_id": "t", "request_id": "r", "step": "0", "run": "run"}
KNOWN |= {"group": "g", "archive_id": "a", "route": "desk"}
"""What a path may name that is there."""
RECORD: dict[str, Any] = {"id": "t", "model": "default", "started_at": 1.0, "ended_at": 2.0, "metadata": {"a": [1]}}
RECORD |= {"place": {"run": "run", "step": 0, "group": "g"}, "reward": 1.0, "logs": ["a"], "metrics": {"m": 1.0}}
BODIES: dict[str, dict[str, Any]] = {
    "/api/trajectories": {"trajectories": [RECORD]},
    "/api/train": {"id": "r", "model": "default", "groups": [{"trajectory_ids": ["t"], "metadata": {"a": 1}}]},
    "/api/models": {"name": "default", "base_model": "tiny", "lora": {"r": 4}},
    "/api/models/{name}/fork": {"name": "other", "from_step": 0},
    "/api/models/{name}/adopt": {"model": "other", "step": 1, "after": 0},
    "/api/runs/ended": {"run": "run-1"},
    "/api/models/{name}/log": {"split": "val", "step": 1, "metrics": {"a": 1.0}, "trajectory_ids": ["t"]},
    "/api/models/{name}/state": {"value": {"a": [1]}},
    "/api/models/{name}/checkpoints/{step}/export": {"format": "peft", "output": "/nowhere/there"},
    "/api/models/{name}/checkpoints/{step}/archive": {"format": "peft"},
    "/api/feedback": {"trajectory_id": "t", "score": 1.0, "comment": "a", "name": "thumbs"},
    "/api/audit": {"trajectory_ids": ["t"], "thread_ids": ["a"], "route": "desk"},
    "/api/audit/removal": {"trajectory_ids": ["t"]},
    "/api/takeover/start": {"margin": 0.1, "share": 0.5},
    "/api/takeover/stop": {},
    "/v1/chat/completions": CHAT,
}
"""A valid body of each route that reads one."""
PARTS: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "hi"}]}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/m/default/t/t/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "default", "prompt": "hi", "max_tokens": 4},
    "/messages": CHAT,
    "/v1/messages": CHAT | {"system": "a", "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "default", "input": HI, "max_output_tokens": 16},
    "/v1beta/models/default:generateContent": {"contents": PARTS, "generationConfig": {"maxOutputTokens": 4}},
    "/v1beta/models/default:streamGenerateContent": {"contents": PARTS},
    "/v1beta/models/default:countTokens": {"contents": PARTS},
    "/r/desk/v1/chat/completions": CHAT,
}
"""A path and a valid body of each API that the server answers before its routes."""
MIDDLEWARE = {"UnexpectedErrors", "AccessChecks", "ModelCalls", "CORSMiddleware"}
MIDDLEWARE |= {"ServerWing.middleware", "ProductionWing.middleware"}
"""What may stand before an application's routes; of these only ModelCalls and the gateway's have paths of their own."""
REFUSED = (502, 503, 507)
"""Statuses above 499 that say what failed: a model that does not answer, a server that is not ready, a full disk."""


def routes_of(served: Any) -> list[Route | Mount]:
    """The routes of an application. Fails for middleware that is not known, since it may answer by itself."""
    while isinstance(served, AccessChecks):
        served = vars(served)["_app"]
    own = {entry.cls.__qualname__ for entry in served.user_middleware}
    assert own <= MIDDLEWARE, f"{own - MIDDLEWARE}: does it answer? Its paths join APIS, its name MIDDLEWARE"
    return list(served.routes)


def filled(path: str, chance: random.Random) -> str:
    """A route's path with names that are there, or odd ones."""

    def name(match: re.Match[str]) -> str:
        odd = chance.choice((*TEXTS, *INTEGERS, "..", "a/b", "%2e%2e", "é"))
        value = str(odd) if chance.random() < 0.4 else KNOWN.get(match[1], "x")
        return quote(value.encode("utf-8", "surrogatepass"), safe="") or "x"

    return re.sub(r"{(\w+)(?::\w+)?}", name, path)


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value of which one part is replaced, removed, repeated or renamed."""
    whole = copy.deepcopy(value)
    places = list(parts_of([whole]))
    holder, key = chance.choice(places)
    match chance.randrange(5):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = holder.pop(key)
        case 2:
            holder[key] = [holder[key]] * chance.choice((1, 2, 40))
        case 3:
            holder[key] = nested(chance.choice((3, 128, 300)))
        case _:
            holder[key] = chance.choice((*TEXTS, *INTEGERS, *NUMBERS, None, True, [], {}))
    return places[0][0][0]


def parts_of(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a JSON value: the object or list, and the key or index."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from parts_of(holder[key])


def written(value: Any, chance: random.Random) -> bytes:
    """JSON, which may be cut or hold a byte that is not UTF-8."""
    text = json.dumps(value).encode()
    if chance.random() < 0.1:
        place = chance.randrange(len(text) + 1)
        return chance.choice((text[:place], text[:place] + b"\xff" + text[place:]))
    return text


async def attack(http: httpx.AsyncClient, doors: list[tuple[str, str, Any]], cases: int) -> int:
    """Send mutated requests to each door: method, path, and a valid body or None. Returns how many were sent."""
    chance, sent = random.Random(0), 0
    for method, path, body in doors:
        for case in range(cases):
            names = chance.choices(["run", "step", "text", "sort", "page", "limit", "after", "alt", "key", "é"], k=2)
            query = urlencode(
                {name: str(chance.choice((*TEXTS, *INTEGERS, "sse", "a"))) for name in names}, errors="replace"
            )
            url = f"{filled(path, chance)}?{query[:2_000]}" if chance.random() < 0.5 else filled(path, chance)
            content = None if body is None else written(mutated(body, chance) if case else body, chance)
            headers = {"content-type": "application/json"} if body is not None else {}
            answer = await http.request(method, url, content=content, headers=headers)
            sent += 1
            told = (method, url[:300], (content or b"")[:1_000], answer.status_code, answer.text[:500])
            assert answer.status_code < 500 or answer.status_code in REFUSED, told
    return sent


def doors_of(served: Any) -> list[tuple[str, str, Any]]:
    """Each method and path of an application with a body for it. Fails for a route that reads one and is in no table."""
    doors: list[tuple[str, str, Any]] = []
    for route in routes_of(served):
        if isinstance(route, Mount):
            doors.append(("GET", f"{route.path}/{{name}}", None))
            continue
        for method in sorted((route.methods or set()) - {"HEAD"}):
            reads = method in ("POST", "PUT", "PATCH")
            assert not reads or route.path in BODIES, f"{method} {route.path} needs a body in BODIES to be fuzzed"
            doors.append((method, route.path, BODIES[route.path] if reads else None))
    return doors


def test_every_api_before_the_routes_is_attacked() -> None:
    patterns = [model_paths.CHATS, passing.BELOW, *(pattern for pattern, _ in model_paths.dialect_paths())]
    for pattern in patterns:
        assert any(pattern.fullmatch(path) for path in APIS), f"{pattern.pattern} needs a path and a body in APIS"
    assert all(any(pattern.fullmatch(path) for pattern in patterns) for path in APIS)


def test_every_listener_is_attacked() -> None:
    """The listeners are found in the source by the test beside this one."""
    assert {name for names in LISTENERS.values() for name in names} == set(APPLICATIONS)


APPLICATIONS = ("server", "server with a key", "ui", "ui with a key", "mcp serve", "mcp serve with a key")


@pytest.mark.parametrize("name", [name for name in APPLICATIONS if not name.startswith("mcp")])
async def test_no_request_to_any_route_is_answered_500(name: str, tmp_path: Path) -> None:
    key = "a-key" if name.endswith("with a key") else None
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with (
        application(name, key, tmp_path) as served,
        serving(served) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http,
    ):
        doors = doors_of(served)
        if name.startswith("server"):  # first, so that pages have a call to show
            doors = [("POST", path, body) for path, body in APIS.items()] + doors
        cases = CASES if key is None else 1  # behind a key are the same routes
        assert await attack(http, doors, cases) == cases * len(doors)
        assert (await http.get("/health" if name.startswith("server") else "/")).status_code == 200


class Pool:
    """Servers of which none starts."""

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[Any]:
        raise McpServerError("shop", "it does not start")
        yield


async def test_no_request_to_mcp_serve_is_answered_500() -> None:
    model: Any = SimpleNamespace(name="default", inference_name=lambda: "default")
    pool: Any = Pool()
    served: Any = ToolEndpoint(pool, model, LoopOptions(), 1_000, UNUSED).application(None)
    async with serving(served) as url, httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        doors = doors_of(served)
        assert await attack(http, doors, 10 * CASES) == 10 * CASES * len(doors)


async def test_a_route_in_no_table_is_told(tmp_path: Path) -> None:
    """The net itself: it fails for what it does not know."""
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as gateway:
        served = app.build(gateway.services, Guard(None))
    served.add_api_route("/api/new", lambda: {}, methods=["POST"])
    with pytest.raises(AssertionError, match="POST /api/new needs a body"):
        doors_of(served)
    served.add_middleware(Strange)
    with pytest.raises(AssertionError, match="Strange"):
        routes_of(served)


class Strange:
    """Middleware that nobody knows."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.inner(scope, receive, send)
