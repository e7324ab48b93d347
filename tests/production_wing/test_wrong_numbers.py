"""A provider whose numbers are wrong, records that do not read back, and steps of this server's own that fail: the app gets the
paid model's answer, and the server starts again."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offbook_production import passing as passing_module
from offbook_production import traffic
from offbook_production.small_answers import SmallModel
from offbook_production.takeover import Takeover
from offbook_production.traffic import RouteCounts, RouteTraffic
from offbook_production.wire import TakeoverState

from .conftest import Opening, Passing

PAID, SMALL = "It is on its way.", "Hello"
LIES: list[Any] = [-7, 1.5, 1e308, float("nan"), float("inf"), True, "5", 10**30, {"n": {"n": 1}}, [3], -(10**400)]


def usages(lie: Any) -> list[dict[str, Any]]:
    right = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 10}}
    return [
        right | {"prompt_tokens": lie},
        right | {"completion_tokens": lie},
        right | {"prompt_tokens_details": lie},
        right | {"prompt_tokens_details": {"cached_tokens": lie}},
    ]


async def test_whatever_a_provider_says_of_its_tokens_calls_pass_and_are_counted_as_unknown(
    passing: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    lying = [usage for lie in LIES for usage in usages(lie)]
    lying = [usage for usage in lying if usage["prompt_tokens_details"] != {"n": {"n": 1}}]  # says nothing wrong
    random.Random(0).shuffle(lying)
    async with passing(model="openai/gpt-4.1") as route:
        for number, usage in enumerate(lying):
            route.paid.usage = usage
            answer = await route.chat(thread=f"t-{number}")
            assert (answer.status_code, answer.content) == (200, route.paid.sent[-1])
        route.paid.usage = None
        await route.chat(thread="right")
        state = await route.state()
        assert (state.calls, state.failed, state.uncounted) == (len(lying) + 1, 0, len(lying))
        assert (state.prompt_tokens, state.completion_tokens, state.cached_tokens) == (30, 7, 10)
        assert state.cost == pytest.approx(101e-6)  # 20 tokens at 2, 10 from the cache at 0.5, 7 at 8
        assert state.failed_steps == {}
        kept = await route.threads()
        assert {call.cost for thread in kept for call in thread.calls} == {None, state.cost}
    assert len([line for line in caplog.messages if "numbers of tokens are not counted" in line]) == 1
    async with passing(model="openai/gpt-4.1") as route:  # the same directory, after a restart
        again = await route.state()
        assert (again.uncounted, again.cost) == (state.uncounted, state.cost)


@pytest.mark.parametrize("lie", [-7, 1.5, 1e308, True, "5", [3]])
@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("anthropic/claude-sonnet-4-5", "/v1/messages", {"model": "claude-sonnet-4-5", "max_tokens": 9}),
        ("openai/gpt-4.1", "/v1/responses", {"model": "gpt-4.1"}),
        ("gemini/gemini-2.5-flash", "/v1beta/models/gemini-2.5-flash:generateContent", {}),
    ],
)
async def test_lies_in_the_numbers_of_every_api_are_counted_as_unknown(
    passing: Opening, lie: Any, model: str, path: str, body: dict[str, Any]
) -> None:
    asked = {
        "/v1/messages": {"messages": [{"role": "user", "content": "Where is box 4821?"}]},
        "/v1/responses": {"input": "Where is box 4821?"},
    }.get(path, {"contents": [{"role": "user", "parts": [{"text": "Where is box 4821?"}]}]})
    async with passing(model=model) as route:
        fields = ["input_tokens", "output_tokens", "promptTokenCount", "candidatesTokenCount"]
        route.paid.usage = dict.fromkeys(fields, 5) | {random.choice(fields[:2]): lie, "thoughtsTokenCount": lie}
        answer = await route.http.post(path, json=body | asked)
        assert (answer.status_code, answer.content) == (200, route.paid.sent[-1])
        state = await route.state()
        assert (state.calls, state.uncounted, state.prompt_tokens, state.recorded) == (1, 1, 0, 1)


OLD_COUNTS = {"calls": 3, "prompt_tokens": -7, "cost": 1e308, "completion_tokens": 1.5}
"""As a version stored them that believed every number."""


def write_note(folder: Path, key: str, text: str) -> None:
    with closing(sqlite3.connect(folder / "records.db")) as database, database:
        database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))


def note_of(folder: Path, key: str) -> str:
    with closing(sqlite3.connect(folder / "records.db")) as database:
        return database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]


@pytest.mark.parametrize(
    "stored",
    [
        json.dumps(OLD_COUNTS),
        '{"calls": 3, "cost": NaN}',
        '{"calls": 3, "cost": -0.5}',
        '{"calls": 1',
    ],
)
async def test_stored_counts_that_do_not_read_back_begin_anew_and_the_server_starts(
    passing: Opening, tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing() as route:
        await route.chat()
    write_note(tmp_path, "route:desk", stored)
    async with passing() as route:
        assert (await route.chat()).status_code == 200
        assert (await route.state()).calls == 1
    assert note_of(tmp_path, "damaged:route:desk") == stored
    assert "route desk: its stored counts do not read back" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"status": "waiting"},
        {"rule": {"margin": 1e308, "highest": 1.5e308}},
        {"decisions": [{"reason": 1}]},
        {"numbers": {"lower": float("nan")}},
        {"stage": 1, "plan": {"stages": [0, 1]}},
    ],
)
async def test_a_stored_takeover_that_does_not_read_back_leaves_the_calls_with_the_paid_model(
    passing: Opening, tmp_path: Path, changed: dict[str, Any]
) -> None:
    async with passing(share=0.0) as route:
        await start(route)
        assert (await route.chat(thread="t-1")).json()["choices"][0]["message"]["content"] == SMALL
    state = json.loads(note_of(tmp_path, "takeover:desk"))
    write_note(tmp_path, "takeover:desk", json.dumps(state | changed))
    async with passing(share=0.0) as route:
        assert (await route.chat(thread="t-1")).json()["choices"][0]["message"]["content"] == PAID
        answer = await route.http.get(f"{route.url}/api/takeover")
        assert TakeoverState.model_validate_json(answer.content).status == "none"


@pytest.mark.parametrize("score", ["good", b"\x00", 9e999])
async def test_a_stored_score_that_is_no_number_costs_its_own_thread(
    passing: Opening, tmp_path: Path, score: Any
) -> None:
    async with passing(share=0.0) as route:
        await start(route)
        for name in ("t-1", "t-2"):
            await route.chat(thread=name)
            body = {"thread_id": name, "route": "desk", "score": 1}
            assert (await route.http.post(f"{route.url}/api/feedback", json=body)).status_code == 200
    with closing(sqlite3.connect(tmp_path / "records.db")) as database, database:
        database.execute("UPDATE takeover_threads SET score = ? WHERE rowid = 1", (score,))
    async with passing(share=0.0) as route:
        answer = await route.http.get(f"{route.url}/api/takeover")
        state = TakeoverState.model_validate_json(answer.content)
        assert (state.status, state.numbers.small) == ("running", 1)


async def start(route: Passing) -> None:
    body = {"share": 0.999, "margin": 0.4}
    answer = await route.http.post(f"{route.url}/api/takeover/start", json=body)
    assert answer.status_code == 200, answer.text


ANSWERING: list[tuple[Any, str]] = [
    (passing_module, "thread_of"),
    (RouteTraffic, "place"),
    (RouteTraffic, "note"),
    (RouteCounts, "add"),
    (traffic, "whole_answer"),
    (traffic, "used_tokens"),
    (RouteTraffic, "_answering"),
    (traffic, "cost_of"),
    (traffic, "read_call"),
    (traffic, "Masking"),
    (traffic, "_trace"),
    (RouteTraffic, "_record"),
    (traffic, "ThreadCall"),
    (traffic, "add_thread_calls"),
]
"""What is done for a call of any route."""
TAKING_OVER: list[tuple[Any, str]] = [
    (Takeover, "active"),
    (Takeover, "asks_small"),
    (Takeover, "add_call"),
    (SmallModel, "chosen"),
    (SmallModel, "answer"),
    (SmallModel, "_gone"),
]
"""What is done to let a small model answer."""


def broken(name: str) -> tuple[Any, type[Exception]]:
    failure = type(f"{name.strip('_').title()}Failure", (Exception,), {})

    def fail(*_: Any, **__: Any) -> Any:
        raise failure("with a user's words")

    return (property(fail) if name == "active" else fail), failure


async def each_broken_in_turn(
    route: Passing,
    steps: list[tuple[Any, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: set[str],
) -> None:
    for number, (place, name) in enumerate(steps):
        before = await route.state()
        caplog.clear()
        with monkeypatch.context() as patched:
            fails, failure = broken(name)
            patched.setattr(place, name, fails)
            for call in range(2):
                answer = await route.chat(thread=f"{name}-{number}-{call}", stream=bool(call))
                assert answer.status_code == 200, (name, answer.text)
                assert any(text.split()[-1] in answer.text for text in expected), (name, answer.text)
            await route.settled()
        after = await route.state()
        grown = [
            count - old.get(reason, 0)
            for new, old in ((after.failed_steps, before.failed_steps), (after.not_recorded, before.not_recorded))
            for reason, count in new.items()
        ]
        assert sum(grown) >= 1, name
        said = [line for line in caplog.messages if failure.__name__ in line]
        assert len(said) == len(set(said)) > 0, (name, caplog.messages)
        if name != "add_thread_calls":  # the store says the text of an error of a write
            assert "user's words" not in "".join(caplog.messages)


async def test_whatever_fails_here_a_call_gets_the_paid_models_answer(
    passing: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing() as route:
        await each_broken_in_turn(route, [*ANSWERING, *TAKING_OVER[:1]], monkeypatch, caplog, {PAID})


async def test_whatever_fails_in_a_takeover_a_call_gets_an_answer_and_where_it_is_decided_the_paid_models(
    passing: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing() as route:
        await start(route)
        await each_broken_in_turn(route, TAKING_OVER, monkeypatch, caplog, {PAID})
        steps = [step for step in ANSWERING if step not in ((RouteCounts, "add"), (traffic, "cost_of"))]
        await each_broken_in_turn(route, steps, monkeypatch, caplog, {PAID, SMALL, 'lo"'})
        assert (await route.chat(thread="after")).json()["choices"][0]["message"]["content"] == SMALL
