"""`/openapi.json`, and requests made of it: no route answers 500, and what it answers fits its schema."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offbook.server.http.auth import Guard
from offbook.server.http.openapi import OPENAPI
from offbook.testing import Action, ScriptedServer, scripted_server
from tests.fakes.gateway import Gateway

if TYPE_CHECKING or find_spec("schemathesis") is not None:
    # Imported before any test runs: pytest parses it, and a collection of garbage during a parse ends in a SystemError of
    # CPython 3.11 where an earlier test left something that warns when it is collected.
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import response_schema_conformance

CASES = int(os.environ.get("OFFBOOK_TEST_API_CASES", "5"))
"""Requests of each kind to each operation."""


KNOWN = {"name": "default", "trajectory_id": "rolled-out", "request_id": "r", "step": 1, "run": "a-run", "group": "g"}
"""What a path may name that is there."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server with a finished rollout of one call."""
    with scripted_server(lambda _: Action("an answer"), tmp_path_factory.mktemp("api")) as running:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        called = running.http.post("/t/rolled-out/v1/chat/completions", json=body)
        record = {"id": "rolled-out", "model": "default", "reward": 1.0, "started_at": 1.0, "ended_at": 2.0}
        record |= {"place": {"run": "a-run", "step": 1, "group": "g"}}
        finished = running.http.post("/api/trajectories", json={"trajectories": [record]})
        assert (called.status_code, finished.status_code) == (200, 200), (called.text, finished.text)
        yield running


async def test_the_description_names_every_route_of_programs_and_the_types_that_its_handlers_read(
    gateway: Gateway,
) -> None:
    found = (await gateway.http.get(OPENAPI)).json()
    assert found["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/api/train", "/api/trajectories", "/health"} <= found["paths"].keys()
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatFields"}
    assert found["components"]["schemas"]["ChatFields"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 100
    for path, operations in found["paths"].items():
        for operation in operations.values():
            declared = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
            assert sorted(declared) == sorted(re.findall(r"{(\w+)}", path)), path
    references = {value for value in _references(found)}
    assert {reference.rpartition("/")[2] for reference in references} <= found["components"]["schemas"].keys()


def test_the_description_is_behind_the_key() -> None:
    refusal = Guard("a-key").refusal(OPENAPI, {"host": "example.com"})
    assert refusal is not None and refusal[0] == 401


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        yield from _references(item)


@pytest.mark.slow("requests made from schemas")
@pytest.mark.parametrize("valid", [True, False], ids=["valid", "invalid"])
def test_no_request_to_any_route_is_answered_500_or_with_what_its_schema_does_not_say(
    served: ScriptedServer, require: Callable[[bool, str], None], valid: bool
) -> None:
    require(find_spec("schemathesis") is not None, "pip install -r requirements/test.txt")
    schema = schemathesis.openapi.from_dict(served.http.get(OPENAPI).json())
    schema.config.update(base_url=served.url)
    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    found = list(schema.get_all_operations())
    operations = [each.ok() for each in found if isinstance(each, Ok)]
    assert len(operations) == len(found) > 20
    checks = [not_a_server_error, response_schema_conformance]
    # Nothing is invalid where any word is a name.
    asked = sum(ask(each, mode, checks) for each in operations if valid or each.body)
    assert asked >= 10 * CASES
    assert served.http.get("/health").json()["status"] == "ok"


def ask(operation: Any, mode: Any, checks: list[Any]) -> int:
    """Send generated requests to an operation. Returns how many."""
    asked = 0

    @settings(
        max_examples=CASES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def run(case: Any, known: bool) -> None:
        nonlocal asked
        if known:
            named = {name: value for name, value in KNOWN.items() if name in case.path_parameters}
            case.path_parameters.update(named)
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "default"
        asked += 1
        case.call_and_validate(checks=checks, timeout=60)

    run()
    return asked
