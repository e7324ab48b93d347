"""Every model of the wire, filled with values at and beyond its bounds: refused as a 400, or stored and read again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from offbook.base import wire
from offbook.base.types import CallOrigin
from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import scripted_sampler

CASES = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
MODELS = sorted({*wire.Wire.__subclasses__(), CallOrigin}, key=lambda model: model.__name__)


def nested(levels: int) -> Any:
    value: Any = 1.5
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


TEXTS = ("\u2028\x85", "a\0b", "\x1b[2J", "\ud800", "x" * 201, "x" * 3_000, "9" * 4_301, "")
INTEGERS = (-1, 0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**64), 10**400)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, -1, 253_402_300_800, 2**64)
ODD: dict[str, tuple[Any, ...]] = {"string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": (True, False)}
ODD[""] = (*TEXTS, *INTEGERS, *NUMBERS, nested(127), nested(128), nested(129), nested(250), nested(400), nested(1_500))
PLAIN: dict[str, Any] = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "null": None, "": {"a": 1}}


def filled(schema: dict[str, Any], root: dict[str, Any], draw: Any, odd: Iterator[bool]) -> Any:
    """A value that fits the schema, but for the one leaf where `odd` says so: there it is drawn from ODD."""
    if "$ref" in schema:
        return filled(root["$defs"][schema["$ref"].rpartition("/")[2]], root, draw, odd)
    if "anyOf" in schema:
        return filled(draw(st.sampled_from(schema["anyOf"])), root, draw, odd)
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    kind = schema.get("type", "")
    if "prefixItems" in schema:
        return [filled(item, root, draw, odd) for item in schema["prefixItems"]]
    if kind == "array":
        return [
            filled(schema["items"], root, draw, odd) for _ in range(draw(st.integers(schema.get("minItems", 0), 2)))
        ]
    if kind == "object" and "properties" in schema:
        needed = schema.get("required", ())
        chosen = [name for name in schema["properties"] if name in needed or draw(st.booleans())]
        return {name: filled(schema["properties"][name], root, draw, odd) for name in chosen}
    if kind == "object":
        inside = schema.get("additionalProperties")
        return {"a": filled(inside if isinstance(inside, dict) else {}, root, draw, odd)} if draw(st.booleans()) else {}
    return draw(st.sampled_from(ODD[kind])) if kind in ODD and next(odd) else PLAIN[kind]


@st.composite
def bodies(draw: Any, model: type[BaseModel]) -> str:
    """The model as JSON with one odd leaf, as a stranger may send it."""
    schema = model.model_json_schema()
    chosen = draw(st.integers(0, 12))
    return json.dumps(filled(schema, schema, draw, (number == chosen for number in range(10_000))))


def finite(text: str) -> Any:
    """What strict JSON says."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_model_of_the_wire_refuses_a_value_or_carries_it(model: type[BaseModel]) -> None:
    @CASES
    @given(text=bodies(model))
    def carried(text: str) -> None:
        try:
            first = model.model_validate_json(text)
        except ValidationError:
            return
        written = first.model_dump_json()
        assert model.model_validate_json(written).model_dump_json() == written

    carried()


PATHS: dict[str, tuple[str, str, type[BaseModel]]] = {
    "finish": ("POST", "/api/trajectories", wire.FinishRequest),
    "log": ("POST", "/api/models/default/log", wire.LogRequest),
    "state": ("PUT", "/api/models/default/state", wire.UserState),
    "train": ("POST", "/api/train", wire.TrainRequest),
    "fork": ("POST", "/api/models/default/fork", wire.ForkRequest),
    "register": ("POST", "/api/models", wire.RegisterRequest),
    "export": ("POST", "/api/models/default/checkpoints/1/export", wire.ExportRequest),
}
READ = ("/api/trajectories", "/api/traces", "/api/models/default/log", "/api/models/default/state", "/api/models", "/")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as made:
        yield made


@pytest.mark.slow("requests made from schemas")
@pytest.mark.parametrize("door", PATHS)
async def test_no_door_takes_what_the_records_cannot_return(gateway: Gateway, door: str) -> None:
    method, path, model = PATHS[door]
    examples: list[str] = []

    @CASES
    @given(text=bodies(model))
    def collect(text: str) -> None:
        examples.append(text)

    collect()
    for text in examples:
        answer = await gateway.http.request(method, path, content=text, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (text[:500], answer.text[:500])
    for place in READ:
        read = await gateway.http.get(place)
        assert read.status_code == 200, (place, read.text[:500])
        if place.startswith("/api"):
            finite(read.text)
    listed = wire.TrajectoryPage.model_validate_json((await gateway.http.get("/api/trajectories")).text)
    wire.TracePage.model_validate_json((await gateway.http.get("/api/traces")).text)
    for record in listed.trajectories:
        assert (await gateway.http.get("/trajectories/" + quote(record.id, safe=""))).status_code in (200, 404)


@pytest.mark.parametrize("step", [-(2**63), 2**63 - 1, 2**63, 2**64, 10**400])
async def test_an_origins_step_is_recorded_or_refused_before_the_call_is_sampled(gateway: Gateway, step: int) -> None:
    sent = {"x-offbook-trajectory": "t", "x-offbook-origin": json.dumps({"step": step})}
    answer = await gateway.chat(sent)
    recorded = [call.origin.step for call in await gateway.calls("t") if call.origin is not None]
    assert (answer.status_code, recorded) in [(200, [step]), (400, [])], answer.text


@pytest.mark.parametrize(("levels", "status"), [(120, 200), (130, 400), (252, 400), (5_000, 400)])
async def test_a_call_nested_deeply_is_refused_or_can_be_read(gateway: Gateway, levels: int, status: int) -> None:
    part = '{"type": "text", "text": "a", "x": ' + "[" * levels + "]" * levels + "}"
    body = f'{{"model": "default", "messages": [{{"role": "user", "content": [{part}]}}]}}'
    sent = {"content-type": "application/json", "x-offbook-trajectory": "deep"}
    answer = await gateway.http.post("/v1/chat/completions", content=body, headers=sent)
    assert answer.status_code == status, answer.text[:300]
    if status == 200:
        record = {"id": "deep", "model": "default", "started_at": 1, "ended_at": 2}
        await gateway.http.post("/api/trajectories", json={"trajectories": [record]})
        read = await gateway.http.get("/api/trajectories/deep")
        assert len(wire.TrajectoryWithCalls.model_validate_json(read.text).calls) == 1
        wire.TracePage.model_validate_json((await gateway.http.get("/api/traces")).text)


async def test_numbers_of_any_length_in_a_url_are_no_500(gateway: Gateway) -> None:
    digits = "9" * 4_301
    await gateway.chat({"x-offbook-trajectory": "t"})
    for path in (
        *(f"/v1/models/default@{number}" for number in (digits, "٣", "²")),
        *(f"/runs/a/steps/{number}" for number in (digits, 2**63)),
    ):
        assert (await gateway.http.get(path)).status_code in (200, 400, 404), path
    called = await gateway.chat(model=f"default@{digits}")
    assert called.status_code == 404
