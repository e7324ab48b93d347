"""A takeover behind the gateway: shares, evidence, guards, drift, failures and restarts, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from offbook.base.takeovers import TakeoverPlan, TakeoverState
from offbook.commands.main import run
from offbook.llms.options import Price
from offbook.server.records.notes import read_note, save_notes
from offbook.server.takeover import inputs
from offbook.server.takeover.stage import needs_of
from offbook.server.upstream.threads import trajectory_id
from offbook.testing import ScriptedChoice, ScriptedCompletion

from .conftest import Opening, Passing

SMALL, PAID = "Hello", "It is on its way."
PLAN: dict[str, Any] = {"stages": [0.5, 1], "margin": 0.4}


async def ask(route: Passing, action: str, **plan: Any) -> TakeoverState:
    body = PLAN | plan if action in ("plan", "start") else {}
    answer = await route.http.post(f"{route.url}/api/takeover/{action}", json=body)
    assert answer.status_code == 200, answer.text
    return TakeoverState.model_validate_json(answer.content)


async def state(route: Passing) -> TakeoverState:
    return TakeoverState.model_validate_json((await route.http.get(f"{route.url}/api/takeover")).content)


async def said(route: Passing, thread: str | None, **body: Any) -> str:
    answer = await route.chat(thread=thread, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def score(route: Passing, thread: str, value: float) -> httpx.Response:
    body = {"thread_id": thread, "route": "desk", "score": value}
    return await route.http.post(f"{route.url}/api/feedback", json=body)


async def threads(route: Passing, numbers: range, scored: Callable[[str], float]) -> dict[str, str]:
    """Let threads ask and be scored by what answered; returns thread -> answer. Ends when the takeover is no longer running."""
    answers: dict[str, str] = {}
    for number in numbers:
        thread = f"t-{number}"
        answers[thread] = await said(route, thread)
        assert (await score(route, thread, scored(answers[thread]))).status_code == 200
        if (await state(route)).status != "running":
            break
    return answers


async def test_a_model_that_is_as_good_takes_over_and_each_thread_stays_on_its_side(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        planned = await ask(route, "plan")
        assert planned.model == "default@0" and planned.needs[0].usual <= planned.needs[0].most
        assert (await state(route)).status == "none"
        await ask(route, "start")
        answers = await threads(route, range(400), lambda _: 1.0)
        now = await state(route)
        assert now.status == "taken_over" and now.share == 1.0
        assert [decision.verdict for decision in now.decisions] == ["started", "passed", "started", "taken_over"]
        passed = now.decisions[1].numbers
        assert passed.score == passed.reference_score == 1.0 and passed.lower is not None and passed.lower > -0.4
        first = dict(list(answers.items())[: passed.tested + passed.reference])
        assert set(first.values()) == {SMALL, PAID}
        for thread, answer in list(first.items())[:10]:
            assert await said(route, thread) == answer
        assert {await said(route, f"new-{number}") for number in range(5)} == {SMALL}
        assert await said(route, None) == SMALL


async def test_a_model_that_is_worse_is_left_and_every_thread_goes_back(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", margin=0.1)
        answers = await threads(route, range(400), lambda answer: float(answer == PAID))
        now = await state(route)
        assert (now.status, now.decisions[-1].verdict) == ("left", "left")
        assert now.decisions[-1].reason == "worse by more than 0.1" and now.decisions[-1].numbers.tested <= 25
        moved = next(thread for thread, answer in answers.items() if answer == SMALL)
        assert await said(route, moved) == PAID


async def test_whatever_fails_here_the_paid_model_answers_and_the_guard_leaves(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.9, 1], answer_seconds=2)
        broken = ScriptedCompletion(status=500, error={"error": {"message": "out of memory"}})
        cut = ScriptedCompletion(dies_after=1)
        route.sampler.completions.extend([broken, cut] * 40)
        streams = [{}, {"stream": True}]
        for number in range(60):
            answer = await route.chat(thread=f"t-{number}", **streams[number % 2])
            assert answer.status_code == 200 and "way." in answer.text and SMALL not in answer.text
            if (await state(route)).status != "running":
                break
        now = await state(route)
        assert now.status == "left" and now.decisions[-1].reason == "guard: failed calls: more than 5%"
        assert sum(now.decisions[-1].numbers.failed.values()) >= 2


async def test_a_late_answer_is_the_paid_models(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1], answer_seconds=0.3)
        route.sampler.completions.append(ScriptedCompletion(gates={0: asyncio.Event()}))
        assert await said(route, "t-1") == PAID
        assert (await state(route)).numbers.failed == {"late": 1}


async def test_streams_tools_and_records_of_the_small_model(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", stages=[0.999, 1], prompt_price=1.0, completion_price=1.0)
        client = openai.AsyncOpenAI(base_url=f"{route.url}/r/desk/v1", api_key="sk-own", max_retries=0)
        stream = await client.chat.completions.create(
            model="gpt-4.1",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"x-offbook-thread": "t-1"},
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == SMALL
        called = ScriptedChoice(pieces=("{}",), token_ids=((1,),), logprobs=((-0.1,),), tool_call=("look_up", "{}"))
        route.sampler.completions.append(ScriptedCompletion(choices=(called,)))
        answer = await route.chat(thread="t-1", metadata={"thread_id": "t-1"})
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
        [thread] = await route.threads()
        assert [call.model for call in thread.calls] == ["default@0", "default@0"]
        assert (await route.state()).calls == 0  # nothing was paid
        numbers = (await state(route)).numbers
        assert (numbers.calls, numbers.failed) == (2, {})
        assert numbers.cost == pytest.approx(4e-6)  # 3 + 1 tokens; a stream does not say its own unless asked
        assert route.paid.asked == []


async def test_state_sides_and_scores_survive_a_restart(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", margin=0.05)
        answers = await threads(route, range(12), lambda _: 1.0)
        before = await state(route)
        assert before.numbers.tested >= 2
        assert (await score(route, "t-0", 0.0)).json()["changed"] is False  # only the first score counts
        assert (await score(route, "nobody", 1.0)).status_code == 404
    async with passing(share=0.0) as route:
        after = await state(route)
        assert after.decisions == before.decisions and after.status == "running"
        for name in ("tested", "reference", "score", "lower", "upper"):
            assert getattr(after.numbers, name) == getattr(before.numbers, name)
        for thread, answer in answers.items():
            assert await said(route, thread) == answer
        await ask(route, "stop")
    async with passing(share=0.0) as route:
        assert (await state(route)).status == "stopped"
        assert {await said(route, thread) for thread in answers} == {PAID}


async def test_decisions_that_a_kill_kept_from_being_stored_are_made_again(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.5, 0.75, 1])
        stored = await route.services.store.read(lambda connection: read_note(connection, "takeover:desk"))
        for number in range(400):
            await said(route, f"t-{number}")
            await score(route, f"t-{number}", 1.0)
            before = await state(route)
            if before.stage == 1 and before.numbers.tested >= 3:
                break
        await route.gateway.takeover.close()
        assert stored is not None
        await route.services.store.write(save_notes, ("takeover:desk", stored))
    async with passing(share=0.0) as route:
        after = await state(route)
        for decision, other in zip(after.decisions, before.decisions, strict=True):
            assert decision.model_copy(update={"decided_at": other.decided_at, "numbers": other.numbers}) == other
        assert (after.stage, after.share) == (1, 0.75)
        assert (after.numbers.tested, after.numbers.lower) == (before.numbers.tested, before.numbers.lower)


async def test_a_restart_goes_on_with_the_round_in_which_it_was(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", threads=15)
        for number in range(400):
            await said(route, f"t-{number}")
            await score(route, f"t-{number}", 1.0)
            before = await state(route)
            if before.decisions[-1].verdict == "round" and before.numbers.tested >= 4:
                break
    async with passing(share=0.0) as route:
        after = await state(route)
        assert after.decisions == before.decisions and after.numbers.tested == before.numbers.tested == 4


async def feedback(route: Passing, /, **body: Any) -> httpx.Response:
    return await route.http.post(f"{route.url}/api/feedback", json=body)


async def test_feedback_that_the_records_refuse_is_no_evidence(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start")
        names = [f"t-{number}" for number in range(6)]
        for name in names:
            await said(route, name)
        for name in names:
            call = f"{trajectory_id('desk', name)}.0000000000000000"
            refused = await feedback(route, call_id=call, score=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_call")
            assert (await feedback(route, thread_id=f"{name}-unknown", route="desk", score=1)).status_code == 404
            assert (await feedback(route, trajectory_id=call, score=1)).status_code == 404
        numbers = (await state(route)).numbers
        assert (numbers.tested, numbers.reference) == (0, 0)


async def test_a_thread_is_evidence_once_whatever_names_it(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", stages=[0.999, 1])
        call = (await route.chat(thread="t-1")).headers["x-offbook-call"]
        for _ in range(2):
            assert (await feedback(route, call_id=call, score=1)).status_code == 200
        assert (await feedback(route, thread_id="t-1", route="desk", score=0)).status_code == 200
        assert (await feedback(route, trajectory_id=trajectory_id("desk", "t-1"), score=0.5)).status_code == 200
        assert (await feedback(route, thread_id="t-1", route="desk", score=0, name="stars")).status_code == 200
        numbers = (await state(route)).numbers
        assert (numbers.tested, numbers.reference, numbers.score) == (1, 0, 1.0)


async def test_a_score_of_a_call_that_the_other_side_answered_is_no_evidence(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", stages=[0.999, 1])
        route.sampler.completions.append(ScriptedCompletion(status=500, error={"error": {"message": "out of memory"}}))
        by_paid = await route.chat(thread="t-1")
        by_small = await route.chat(thread="t-1")
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in (by_paid, by_small)]
        assert texts == [PAID, SMALL]
        assert (await feedback(route, call_id=by_paid.headers["x-offbook-call"], score=1)).status_code == 200
        assert (await state(route)).numbers.tested == 0
        assert (await feedback(route, call_id=by_small.headers["x-offbook-call"], score=0)).status_code == 200
        numbers = (await state(route)).numbers
        assert (numbers.tested, numbers.score) == (1, 0.0)


async def test_a_score_is_evidence_for_the_route_of_its_thread_alone(passing: Opening) -> None:
    async with passing() as route:
        side = {"request": {"messages": [{"role": "user", "content": "hi"}]}, "plan": PLAN | {"model": "default"}}
        other = f"{route.url}/api/routes/other"
        assert (await route.http.post(f"{other}/side", json=side | {"thread_id": "t-1"})).status_code == 200
        await ask(route, "start")
        call = (await route.chat(thread="t-1")).headers["x-offbook-call"]
        assert (await feedback(route, call_id=call, route="other", score=1)).status_code == 200
        states = [
            TakeoverState.model_validate_json(
                (await route.http.get(f"{route.url}/api/takeover", params={"route": name})).content
            )
            for name in ("desk", "other")
        ]
        assert [now.numbers.tested + now.numbers.reference for now in states] == [1, 0]


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["not recorded", "recorded"])
async def test_a_score_beyond_the_plans_range_is_no_evidence_and_said(
    passing: Opening, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing(share=share) as route:
        await ask(route, "start", stages=[0.999, 1])
        await said(route, "t-1")
        for stars in (5, -1):
            answer = await score(route, "t-1", stars)
            assert answer.status_code == (200 if share else 400)
            assert share or answer.json()["error"]["code"] == "score_out_of_range"
        numbers = (await state(route)).numbers
        assert (numbers.tested, numbers.out_of_range) == (0, 2)
        assert len([line for line in caplog.messages if "is not between the takeover's lowest (0)" in line]) == 1
        assert (await score(route, "t-1", 1)).status_code == 200
        assert (await state(route)).numbers.tested == 1


@pytest.mark.parametrize("number", [1e308, -1e308, 1e-308, 0, -1, 2**70])
@pytest.mark.parametrize(
    "field",
    [name for name, field in TakeoverPlan.model_fields.items() if name not in ("model", "stages", "score", "approve")],
)
def test_no_number_of_a_plan_breaks_its_needs(field: str, number: float) -> None:
    body = {"stages": [0, 0.5, 1], field: number}
    try:
        plan = TakeoverPlan.model_validate(body)
    except ValidationError as error:
        assert field in str(error)
    else:
        assert all(0 < needs.usual <= needs.most <= needs.traffic < 2**63 for needs in needs_of(plan))


async def test_plans_that_no_traffic_can_show_are_refused_by_name(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        for plan in ({"highest": 1e308}, {"margin": 1e-300}, {"stages": [1e-320, 1]}, {"answer_seconds": 1e308}):
            for action in ("plan", "start"):
                answer = await route.http.post(f"{route.url}/api/takeover/{action}", json=PLAN | plan)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), plan
        assert (await state(route)).status == "none"


async def test_a_sampler_that_is_known_to_be_gone_is_not_waited_for_and_its_return_is_seen(
    passing: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1], answer_seconds=3600)
        assert await said(route, "t-1") == SMALL
        sampler = route.services.sampler
        for gone in ("starting", "failed", "stopped"):
            monkeypatch.setattr(sampler, "_state", gone)
            async with asyncio.timeout(20):
                assert await said(route, f"t-{gone}") == PAID
        assert (await state(route)).numbers.failed == {"sampler starting": 1, "sampler failed": 1, "sampler stopped": 1}
        assert len(route.sampler.received) == 1
        monkeypatch.setattr(sampler, "_state", "ok")
        assert await said(route, "t-failed") == SMALL


async def test_calls_that_go_past_a_failed_sampler_let_it_be_started_again(
    passing: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1], answer_seconds=3600)
        sampler = route.services.sampler
        monkeypatch.setattr(sampler, "_state", "failed")
        assert await said(route, "t-1") == PAID
        async with asyncio.timeout(20):
            while sampler.state != "starting":  # its supervisor would start it now
                await asyncio.sleep(0)


async def test_in_shadow_a_sampler_that_is_gone_is_no_disagreement(
    passing: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0, 0.5, 1])
        monkeypatch.setattr(route.services.sampler, "_state", "starting")
        for number in range(10):
            assert await said(route, f"t-{number}") == PAID
        numbers = (await state(route)).numbers
        assert (numbers.tested, numbers.calls) == (0, 0)


@pytest.mark.parametrize("agrees", [True, False])
async def test_in_shadow_the_small_model_answers_unseen_and_must_agree(passing: Opening, agrees: bool) -> None:
    async with passing(share=0.0) as route:
        route.paid.text = SMALL if agrees else PAID
        await ask(route, "start", stages=[0, 0.5, 1], threads=300)
        for number in range(400):
            assert await said(route, f"t-{number}") == route.paid.text
            now = await state(route)
            if now.stage == 1 or now.status != "running":
                break
        last = next(decision for decision in reversed(now.decisions) if decision.verdict != "started")
        assert (last.share, last.verdict) == (0.0, "passed" if agrees else "left")
        assert last.numbers.score == float(agrees) and len(route.paid.asked) >= last.numbers.tested
        assert await said(route, "t-0") == route.paid.text  # a thread that began in shadow stays


async def test_a_person_approves_each_stage(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", approve=True)
        await threads(route, range(400), lambda _: 1.0)
        assert (await state(route)).status == "waiting" and (await state(route)).share == 0.5
        assert (await ask(route, "approve")).share == 1.0
        refused = await route.http.post(f"{route.url}/api/takeover/approve", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_waiting")
        again = await route.http.post(f"{route.url}/api/takeover/start", json=PLAN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "takeover_active")


@pytest.mark.parametrize("few", [1, 100], ids=["a long shadow", "a shadow too short to know"])
async def test_calls_unlike_those_that_were_seen_go_to_the_paid_model_and_many_end_it(
    few: int, passing: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "FEW", few)
    async with passing(share=0.0) as route:
        route.paid.text = SMALL
        await ask(route, "start", stages=[0, 0.999, 1], max_unknown=0.3)
        for number in range(400):
            await said(route, f"t-{number}")
            if (await state(route)).stage == 1:
                break
        for number in range(few):
            await said(route, f"more-{number}")
        route.paid.text = PAID
        assert await said(route, "new") == SMALL
        assert await said(route, "long", messages=[{"role": "user", "content": "x" * 5000}]) == PAID
        tool = {"type": "function", "function": {"name": "refund", "parameters": {"type": "object", "properties": {}}}}
        for number in range(60):
            answer = await route.chat(thread=f"new-{number}", tools=[tool])
            assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"  # the paid model's
        now = await state(route)
        assert now.status == "left"
        assert now.decisions[-1].reason == "drift: calls unlike those that were seen (new tools, longer): more than 30%"


async def test_what_users_ask_drifts_and_sends_the_traffic_back(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        for number in range(120):  # as in a first stage
            asked = {
                "messages": [{"role": "user", "content": f"{'Where is' if number % 2 else 'Who owns'} box {number}?"}]
            }
            route.gateway.takeover.seen.learn(asked, 300)
        await ask(route, "start", stages=[0.5, 0.999, 1], margin=0.9, max_unknown=0.3)
        await threads(route, range(100), lambda _: 1.0)
        assert (now := await state(route)).stage >= 1, now
        assert await said(route, "as-before") == SMALL
        for number in range(100):
            refund = f"I was charged twice, please refund payment {number}"
            answer = await said(route, f"new-{number}", messages=[{"role": "user", "content": refund}])
            assert answer == PAID
            if (now := await state(route)).status == "left":
                break
        assert now.decisions[-1].reason == "drift: calls unlike those that were seen (new words): more than 30%"
        assert now.decisions[-1].numbers.unknown >= 3


async def asked_until_left(route: Passing, **body: Any) -> TakeoverState:
    """The state after the calls of new threads that end the takeover."""
    for number in range(300):
        assert (await route.chat(thread=f"t-{number}", **body)).status_code == 200
        await route.gateway.traffic.settled()
        if (now := await state(route)).status != "running":
            return now
    raise AssertionError(f"the takeover goes on: {now}")


async def test_a_slow_small_model_is_left(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", slow_seconds=1e-6)
        now = await asked_until_left(route)
        assert now.status == "left" and now.decisions[-1].reason == "guard: calls slower than 1e-06 s: more than 5%"
        assert now.decisions[-1].numbers.slow == now.decisions[-1].numbers.calls
        assert await said(route, "after") == PAID


@pytest.mark.parametrize(("price", "status"), [(40.0, "left"), (0.01, "running")])
async def test_a_small_model_that_costs_more_is_left(
    passing: Opening, monkeypatch: pytest.MonkeyPatch, price: float, status: str
) -> None:
    monkeypatch.setattr("offbook.server.takeover.stage.COST_CALLS", 5)
    async with passing(share=0.0) as route:
        traffic = route.gateway.traffic
        assert traffic.upstream is not None
        traffic.upstream = replace(traffic.upstream, price=Price(prompt=2.0, completion=8.0))
        await ask(route, "start", prompt_price=price, completion_price=price)
        for number in range(40):
            await said(route, f"t-{number}")
            await traffic.settled()
        now = await state(route)
        assert now.status == status
        if status == "left":
            numbers = now.decisions[-1].numbers
            assert numbers.cost is not None and numbers.reference_cost == pytest.approx(116e-6)  # 30 at 2, 7 at 8
            assert (
                now.decisions[-1].reason == f"guard: {numbers.cost:.6f} USD per call, and the paid model costs 0.000116"
            )


async def test_a_tool_that_is_broken_is_found_and_ends_it(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1])
        call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        asked = [{"role": "user", "content": "Where is box 4821?"}, {"role": "assistant", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "1"}
        for number in range(10):
            assert await said(route, f"t-{number}", messages=[*asked, result | {"content": "on shelf 7"}]) == SMALL
        now = await asked_until_left(route, messages=[*asked, result | {"content": "Error: no connection"}])
        assert now.decisions[-1].reason == "guard: failed results of the app's tools: more than 10%"
        numbers = now.decisions[-1].numbers
        assert 2 <= numbers.tool_errors <= 20 and numbers.results == 10 + numbers.tool_errors
        assert await said(route, "after") == PAID


async def test_calls_without_a_thread_stay_with_the_paid_model_until_all_are_moved(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1])
        assert {await said(route, None) for _ in range(5)} == {PAID}


@pytest.mark.parametrize("body", [b"[]", b'{"tools": 3, "messages": []}', b'{"tools": [1, {"function": 2}]}'])
async def test_a_body_that_is_no_chat_is_the_paid_models(passing: Opening, body: bytes) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", stages=[0.999, 1])
        headers = {"x-offbook-thread": "t-1", "content-type": "application/json"}
        await route.http.post("/v1/chat/completions", content=body, headers=headers)
        assert len(route.paid.asked) == 1 and route.sampler.received == []


async def test_the_commands_plan_start_show_stop_and_export(
    passing: Opening, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with passing(share=0.0) as route:

        async def command(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, ["takeover", *words, "--url", route.url])
            captured = capsys.readouterr()
            return code, captured.out + captured.err

        code, text = await command("plan", "--stages", "0,0.25,1", "--margin", "0.1")
        assert code == 0 and "shadow" in text and "25 %" in text and "of all" in text
        code, text = await command("plan", "--stages", "0.5,0.25")
        assert code == 2 and "rising shares" in text
        code, text = await command("start", "--stages", "0.5,1", "--approve")
        assert code == 0 and "desk: running, default@0" in text and "50 %" in text
        code, text = await command("status")
        assert code == 0 and "started: default@0" in text
        code, text = await command("approve")
        assert code == 1 and "no stage waits" in text
        code, text = await command("stop", "--route", "desk")
        assert code == 0 and "stopped: by a person" in text
        code, text = await command("status", "--route", "other")
        assert code == 1 and "no route 'other': this server has desk" in text
        code, text = await command("export", "--to", f"jsonl:{tmp_path / 'traces'}")
        assert code == 0 and "desk: 2 decisions" in text
        lines = (tmp_path / "traces" / "takeovers.jsonl").read_text().splitlines()
        assert [json.loads(line)["verdict"] for line in lines] == ["started", "stopped"]
