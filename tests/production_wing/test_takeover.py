"""A takeover behind the gateway: the share, the evidence, failures and restarts, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from offbook.commands.main import run
from offbook.server.records.notes import read_note, save_notes
from offbook_production.threads import trajectory_id
from offbook_production.wire import TakeoverRule, TakeoverState
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion

from .conftest import Opening, Passing

SMALL, PAID = "Hello", "It is on its way."
RULE: dict[str, Any] = {"share": 0.5, "threads": 20, "margin": 0.4}
NEARLY_ALL = 0.999


async def ask(route: Passing, action: str, **rule: Any) -> TakeoverState:
    body = RULE | rule if action == "start" else {}
    answer = await route.http.post(f"{route.url}/api/takeover/{action}", json=body)
    assert answer.status_code == 200, answer.text
    return TakeoverState.model_validate_json(answer.content)


async def state(route: Passing) -> TakeoverState:
    answer = await route.http.get(f"{route.url}/api/takeover")
    return TakeoverState.model_validate_json(answer.content)


async def said(route: Passing, thread: str | None, **body: Any) -> str:
    answer = await route.chat(thread=thread, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def feedback(route: Passing, /, **body: Any) -> httpx.Response:
    return await route.http.post(f"{route.url}/api/feedback", json=body)


async def threads(route: Passing, numbers: range, scored: Callable[[str], float]) -> dict[str, str]:
    """Let threads ask and be scored by what answered; returns thread -> answer. Ends when the takeover is no longer running."""
    answers: dict[str, str] = {}
    for number in numbers:
        thread = f"t-{number}"
        answers[thread] = await said(route, thread)
        value = scored(answers[thread])
        assert (await feedback(route, thread_id=thread, route="desk", score=value)).status_code == 200
        if (await state(route)).status != "running":
            break
    return answers


async def test_a_model_that_is_as_good_takes_over_and_each_thread_stays_on_its_side(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        started = await ask(route, "start")
        assert (started.model, started.status, started.share) == ("default@0", "running", 0.5)
        answers = await threads(route, range(400), lambda _: 1.0)
        now = await state(route)
        assert (now.status, now.share) == ("taken_over", 1.0)
        assert [decision.verdict for decision in now.decisions] == ["started", "taken_over"]
        passed = now.decisions[1].numbers
        assert min(passed.small, passed.paid) == 20 and passed.small_score == passed.paid_score == 1.0
        assert passed.lower is not None and -0.4 < passed.lower < 0.0
        assert set(answers.values()) == {SMALL, PAID}
        for thread, answer in list(answers.items())[:10]:
            assert await said(route, thread) == answer
        assert {await said(route, f"new-{number}") for number in range(5)} == {SMALL}
        assert await said(route, None) == SMALL


async def test_a_model_that_is_worse_is_left_and_every_thread_goes_back(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", margin=0.1)
        answers = await threads(route, range(400), lambda answer: float(answer == PAID))
        now = await state(route)
        assert now.status == "left" and now.decisions[-1].reason == "not shown to be worse by less than 0.1"
        moved = next(thread for thread, answer in answers.items() if answer == SMALL)
        assert await said(route, moved) == PAID


async def test_a_model_whose_scores_fall_after_it_took_over_is_left(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start")
        await threads(route, range(400), lambda _: 1.0)
        for number in range(400, 480):
            await said(route, f"t-{number}")
            await feedback(route, thread_id=f"t-{number}", route="desk", score=1.0 if number < 420 else 0.0)
            if (now := await state(route)).status != "taken_over":
                break
        assert number == 439  # the first twenty scores were as before, the second were not
        assert (now.status, now.decisions[-1].reason) == ("left", "worse by more than 0.4 since it took over")
        assert await said(route, "t-0") == PAID


async def test_whatever_fails_here_the_paid_model_answers_and_many_failures_end_it(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", share=0.9, answer_seconds=2)
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
        assert now.status == "left" and now.decisions[-1].reason == "more than 10 of 11 calls failed"
        assert sum(now.decisions[-1].numbers.failed.values()) == 11


async def test_a_late_answer_is_the_paid_models(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", share=NEARLY_ALL, answer_seconds=0.3)
        route.sampler.completions.append(ScriptedCompletion(gates={0: asyncio.Event()}))
        assert await said(route, "t-1") == PAID
        assert (await state(route)).numbers.failed == {"late": 1}


async def test_streams_tools_and_records_of_the_small_model(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", share=NEARLY_ALL)
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
        assert route.paid.asked == []


async def test_state_sides_and_scores_survive_a_restart(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", margin=0.05)
        answers = await threads(route, range(12), lambda _: 1.0)
        before = await state(route)
        assert before.numbers.small >= 2
        again = await feedback(route, thread_id="t-0", route="desk", score=0.0)
        assert again.json()["changed"] is False  # only the first score counts
        assert (await feedback(route, thread_id="nobody", route="desk", score=1.0)).status_code == 404
    async with passing(share=0.0) as route:
        after = await state(route)
        assert after.decisions == before.decisions and after.status == "running"
        assert after.numbers.model_copy(update={"calls": before.numbers.calls}) == before.numbers
        for thread, answer in answers.items():
            assert await said(route, thread) == answer
        await ask(route, "stop")
    async with passing(share=0.0) as route:
        assert (await state(route)).status == "stopped"
        assert {await said(route, thread) for thread in answers} == {PAID}


async def test_a_decision_that_a_kill_kept_from_being_stored_is_made_again_and_the_watch_goes_on(
    passing: Opening,
) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start")
        stored = await route.services.store.read(lambda connection: read_note(connection, "takeover:desk"))
        await threads(route, range(400), lambda _: 1.0)
        for number in range(400, 403):
            await said(route, f"t-{number}")
            await feedback(route, thread_id=f"t-{number}", route="desk", score=1.0)
        before = await state(route)
        await route.gateway.takeover.close()
        assert stored is not None
        await route.services.store.write(save_notes, ("takeover:desk", stored))
    async with passing(share=0.0) as route:
        after = await state(route)
        assert [decision.verdict for decision in after.decisions] == ["started", "taken_over"]
        assert after.numbers.model_copy(update={"calls": before.numbers.calls}) == before.numbers
        assert after.numbers.small == 3
    async with passing(share=0.0) as route:  # from the stored decision
        assert (await state(route)).decisions == after.decisions


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
        assert (numbers.small, numbers.paid) == (0, 0)


async def test_a_thread_is_evidence_once_whatever_names_it(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", share=NEARLY_ALL)
        call = (await route.chat(thread="t-1")).headers["x-offbook-call"]
        for _ in range(2):
            assert (await feedback(route, call_id=call, score=1)).status_code == 200
        assert (await feedback(route, thread_id="t-1", route="desk", score=0)).status_code == 200
        assert (await feedback(route, trajectory_id=trajectory_id("desk", "t-1"), score=0.5)).status_code == 200
        assert (await feedback(route, thread_id="t-1", route="desk", score=0, name="stars")).status_code == 200
        numbers = (await state(route)).numbers
        assert (numbers.small, numbers.paid, numbers.small_score) == (1, 0, 1.0)


async def test_a_score_of_a_call_that_the_other_side_answered_is_no_evidence(passing: Opening) -> None:
    async with passing() as route:
        await ask(route, "start", share=NEARLY_ALL)
        route.sampler.completions.append(ScriptedCompletion(status=500, error={"error": {"message": "out of memory"}}))
        by_paid = await route.chat(thread="t-1")
        by_small = await route.chat(thread="t-1")
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in (by_paid, by_small)]
        assert texts == [PAID, SMALL]
        assert (await feedback(route, call_id=by_paid.headers["x-offbook-call"], score=1)).status_code == 200
        assert (await state(route)).numbers.small == 0
        assert (await feedback(route, call_id=by_small.headers["x-offbook-call"], score=0)).status_code == 200
        numbers = (await state(route)).numbers
        assert (numbers.small, numbers.small_score) == (1, 0.0)


async def test_a_score_of_another_routes_thread_is_no_evidence(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start")
        await said(route, "t-1")
        assert (await feedback(route, thread_id="t-1", route="other", score=1)).status_code == 404
        numbers = (await state(route)).numbers
        assert (numbers.small, numbers.paid) == (0, 0)
        assert (await feedback(route, thread_id="t-1", route="desk", score=1)).status_code == 200
        numbers = (await state(route)).numbers
        assert numbers.small + numbers.paid == 1


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["not recorded", "recorded"])
async def test_a_score_beyond_the_rules_range_is_no_evidence_and_logged(
    passing: Opening, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with passing(share=share) as route:
        await ask(route, "start", share=NEARLY_ALL)
        await said(route, "t-1")
        for stars in (5, -1):
            answer = await feedback(route, thread_id="t-1", route="desk", score=stars)
            assert answer.status_code == (200 if share else 400)
            assert share or answer.json()["error"]["code"] == "score_out_of_range"
        numbers = (await state(route)).numbers
        assert numbers.small == 0
        assert len([line for line in caplog.messages if "is not between the takeover's lowest (0)" in line]) == 1
        assert (await feedback(route, thread_id="t-1", route="desk", score=1)).status_code == 200
        assert (await state(route)).numbers.small == 1


@pytest.mark.parametrize("number", [1e308, -1e308, 1e-308, 0, -1, 2**70])
@pytest.mark.parametrize("field", [name for name in TakeoverRule.model_fields if name not in ("model", "score")])
def test_a_number_that_no_traffic_can_show_is_refused_by_name(field: str, number: float) -> None:
    try:
        rule = TakeoverRule.model_validate({field: number})
    except ValidationError as error:
        assert field in str(error)
    else:
        assert 0.0 <= rule.scaled(rule.lowest) < rule.scaled(rule.highest) <= 1.0


async def test_a_refused_rule_begins_nothing_and_one_takeover_runs_at_a_time(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        for rule in ({"highest": 1e308}, {"margin": 1e-300}, {"share": 1e-320}, {"answer_seconds": 1e308}):
            answer = await route.http.post(f"{route.url}/api/takeover/start", json=RULE | rule)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), rule
        assert (await state(route)).status == "none"
        await ask(route, "start")
        again = await route.http.post(f"{route.url}/api/takeover/start", json=RULE)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "takeover_active")


async def test_a_sampler_that_is_known_to_be_gone_is_not_waited_for_and_its_return_is_seen(
    passing: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", share=NEARLY_ALL, answer_seconds=3600)
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
        await ask(route, "start", share=NEARLY_ALL, answer_seconds=3600)
        sampler = route.services.sampler
        monkeypatch.setattr(sampler, "_state", "failed")
        assert await said(route, "t-1") == PAID
        async with asyncio.timeout(20):
            while sampler.state != "starting":  # its supervisor would start it now
                await asyncio.sleep(0)


async def test_calls_without_a_thread_stay_with_the_paid_model_until_all_are_moved(passing: Opening) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", share=NEARLY_ALL)
        assert {await said(route, None) for _ in range(5)} == {PAID}


@pytest.mark.parametrize("body", [b"[]", b"7"])
async def test_a_body_that_is_no_chat_is_the_paid_models(passing: Opening, body: bytes) -> None:
    async with passing(share=0.0) as route:
        await ask(route, "start", share=NEARLY_ALL)
        headers = {"x-offbook-thread": "t-1", "content-type": "application/json"}
        await route.http.post("/v1/chat/completions", content=body, headers=headers)
        assert len(route.paid.asked) == 1 and route.sampler.received == []


async def test_the_commands_start_show_and_stop(passing: Opening, capsys: pytest.CaptureFixture[str]) -> None:
    async with passing(share=0.0) as route:

        async def command(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, ["takeover", *words, "--url", route.url])
            captured = capsys.readouterr()
            return code, captured.out + captured.err

        code, text = await command("start", "--margin", "1.5")
        assert code == 2 and "the margin is smaller than their difference" in text
        code, text = await command("start", "--share", "0.5", "--threads", "20")
        assert code == 0 and "desk: running, default@0" in text and "50 % of new threads" in text
        code, text = await command("status")
        assert code == 0 and "started: 0.5 of threads, 20 scores of each side, margin 0.1" in text
        code, text = await command("stop")
        assert code == 0 and "stopped: by a person" in text
