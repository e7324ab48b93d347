"""One question over real HTTP, through litellm: what each kind of answer becomes, on both of its client paths."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from offbook.base.errors import ConfigError, LlmError
from offbook.llms import Llm, Tokens, spending
from offbook.testing import (
    LlmReply,
    LlmRequest,
    chooses_nothing,
    cuts,
    fails,
    filters,
    hangs,
    refuses,
    resets,
    says,
    scripted_llm,
    sends,
)

from .asking import GOOD, HELLO, Verdict, llm_at

ROUTES = pytest.mark.parametrize("model", ["openai/judge", "hosted_vllm/judge"])


@ROUTES
@pytest.mark.parametrize(
    ("reply", "repairs"),
    [
        (says(GOOD), 0),
        (says(f"\n{GOOD} "), 0),
        (says(f"<think>2 > 1</think>{GOOD}"), 0),
        (says(f"```json\n{GOOD}\n```"), 1),
        (says(f"Here is my verdict: {GOOD}\nI hope that it helps."), 1),
    ],
)
async def test_json_in_prose_and_in_fences_is_read(reply: LlmReply, repairs: int, model: str) -> None:
    with scripted_llm([reply]) as endpoint:
        answer = await llm_at(endpoint, model).ask(HELLO, Verdict)
    assert (answer.value.score, answer.repairs, answer.cached, len(endpoint.requests)) == (0.5, repairs, False, 1)
    assert (answer.tokens, answer.served_model) == (Tokens(10, 5), answer.served_model)


@ROUTES
@pytest.mark.parametrize(
    ("reply", "kind", "requests", "words"),
    [
        (refuses("I will not judge this"), "refused", 1, "I will not judge this"),
        (filters(), "filtered", 1, "content filter"),
        (cuts('{"score": 0.'), "cut", 1, "raise max_tokens="),
        (cuts(GOOD), "cut", 1, "token limit"),
        (says(None), "empty", 2, "no text"),
        (says(""), "empty", 2, "no text"),
        (chooses_nothing(), "empty", 2, "no choices"),
        (says("I cannot say."), "invalid", 2, "no JSON object"),
        (says('{"score": NaN}'), "invalid", 2, "not finite"),
        (says('{"score": 1, "score": 0}'), "invalid", 2, "a key comes twice"),
        (says(f"{GOOD} or rather {GOOD}"), "invalid", 2, "not one object"),
        (says('{"score": 0.'), "invalid", 2, "no JSON object"),
        (says('{"grade": 1}'), "invalid", 2, "score: Field required"),
        (fails(401, "who are you?"), "authentication", 1, "api_key="),
        (fails(403, "not you"), "authentication", 1, "api_key="),
        (fails(429, "no money", code="insufficient_quota"), "quota", 1, "no money"),
        (fails(429, "You exceeded your current quota, please check your billing details"), "quota", 1, "quota"),
        (fails(400, "This model's maximum context length is 10 tokens"), "failed", 1, "maximum context length"),
        (fails(404, "no such model"), "failed", 1, "no such model"),
        (fails(400, "flagged", code="content_filter"), "filtered", 1, "flagged"),
    ],
)
async def test_what_asking_again_does_not_help_is_an_error_of_its_kind(
    reply: LlmReply, kind: str, requests: int, words: str, model: str
) -> None:
    with scripted_llm([reply]) as endpoint, pytest.raises(LlmError, match=words) as raised:
        await llm_at(endpoint, model).ask(HELLO, Verdict)
    assert (raised.value.kind, len(endpoint.requests)) == (kind, requests)
    assert raised.value.lasting == (kind in ("authentication", "quota"))
    assert str(raised.value).startswith(f"{model}: ")


@ROUTES
@pytest.mark.parametrize(
    "reply", [fails(500), fails(502), fails(503), fails(429), fails(408), resets(), sends("<html>busy</html>")]
)
async def test_what_passes_is_asked_again_until_it_succeeds(reply: LlmReply, model: str) -> None:
    with scripted_llm([reply, reply, says(GOOD)]) as endpoint:
        answer = await llm_at(endpoint, model).ask(HELLO, Verdict)
    assert (answer.value.score, len(endpoint.requests), answer.tokens) == (0.5, 3, Tokens(10, 5))


@ROUTES
async def test_retries_are_ours_alone_and_end(model: str) -> None:
    with scripted_llm([fails(500, "broken")]) as endpoint, pytest.raises(LlmError, match="after 4 attempts") as raised:
        await llm_at(endpoint, model, retries=3).ask(HELLO, Verdict)
    assert (raised.value.kind, len(endpoint.requests)) == ("failed", 4)


@ROUTES
async def test_an_endpoint_that_hangs_is_left_after_the_timeout_and_asked_again(model: str) -> None:
    with scripted_llm([hangs(), says(GOOD)]) as endpoint:
        answer = await llm_at(endpoint, model, timeout=1.0).ask(HELLO, Verdict)
        assert (answer.value.score, len(endpoint.requests)) == (0.5, 2)
    with scripted_llm([hangs()]) as endpoint, pytest.raises(LlmError) as raised:
        await llm_at(endpoint, model, timeout=0.7, retries=1).ask(HELLO, Verdict)
    assert (raised.value.kind, len(endpoint.requests)) == ("timeout", 2)


async def test_a_server_that_nobody_listens_at_is_a_failure() -> None:
    with scripted_llm([says(GOOD)]) as endpoint:
        gone = endpoint.url
    with pytest.raises(LlmError, match="after 2 attempts") as raised:
        await Llm("openai/judge", api_base=gone, cache=None, retries=1).ask(HELLO, Verdict)
    assert raised.value.kind == "failed"


async def test_retry_after_is_honoured() -> None:
    loop = asyncio.get_running_loop()
    with scripted_llm([fails(429, headers={"retry-after": "1"}), says(GOOD)]) as endpoint:
        began = loop.time()
        await llm_at(endpoint).ask(HELLO, Verdict)
    assert loop.time() - began >= 1.0


async def test_a_wait_past_the_deadline_is_not_waited_for() -> None:
    words = "next attempt would be in 3600 s, past deadline=5 s"
    reply = fails(429, headers={"retry-after": "3600"})
    with scripted_llm([reply]) as endpoint, pytest.raises(LlmError, match=words) as raised:
        await llm_at(endpoint, deadline=5.0).ask(HELLO, Verdict)
    assert (raised.value.kind, len(endpoint.requests)) == ("failed", 1)


async def test_the_deadline_holds_over_all_attempts() -> None:
    words = r"no answer within deadline=1\.5 s"
    with scripted_llm([hangs()]) as endpoint, pytest.raises(LlmError, match=words) as raised:
        await llm_at(endpoint, deadline=1.5).ask(HELLO, Verdict)
    assert raised.value.kind == "timeout"


async def test_a_cancelled_question_ends_at_once() -> None:
    with scripted_llm([hangs()]) as endpoint:
        asking = asyncio.create_task(llm_at(endpoint).ask(HELLO, Verdict))
        async with asyncio.timeout(20):
            while not endpoint.requests:
                await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_an_answer_that_does_not_fit_is_asked_for_once_more_with_the_reason() -> None:
    with scripted_llm([says('{"grade": 1}', usage=(7, 2)), says(GOOD, usage=(20, 3))]) as endpoint:
        answer = await llm_at(endpoint).ask(HELLO, Verdict)
    assert (answer.value.score, answer.repairs, answer.tokens) == (0.5, 1, Tokens(27, 5))
    first, again = (request.messages for request in endpoint.requests)
    assert first == HELLO
    assert again[:2] == [*HELLO, {"role": "assistant", "content": '{"grade": 1}'}]
    assert "score: Field required" in again[2]["content"] and '"score"' in again[2]["content"]


async def test_a_check_rejects_what_fits_the_schema() -> None:
    def at_most_one(verdict: Verdict) -> None:
        if verdict.score > 1:
            raise ValueError("scores end at 1")

    with scripted_llm([says('{"score": 7}'), says(GOOD)]) as endpoint:
        answer = await llm_at(endpoint).ask(HELLO, Verdict, check=at_most_one)
    assert (answer.value.score, answer.repairs) == (0.5, 1)
    assert "scores end at 1" in endpoint.requests[1].messages[-1]["content"]
    with scripted_llm([says('{"score": 7}')]) as endpoint, pytest.raises(LlmError, match="scores end at 1") as raised:
        await llm_at(endpoint).ask(HELLO, Verdict, check=at_most_one)
    assert (raised.value.kind, len(endpoint.requests)) == ("invalid", 2)


@ROUTES
async def test_the_schema_is_sent_as_it_is_and_strictly_only_where_that_can_be(model: str) -> None:
    class Loose(BaseModel):
        score: float
        why: str = "no reason"

    with scripted_llm([says(GOOD)]) as endpoint:
        await llm_at(endpoint, model).ask(HELLO, Verdict)
        answer = await llm_at(endpoint, model).ask(HELLO, Loose)
    closed, loose = (request.body["response_format"]["json_schema"] for request in endpoint.requests)
    assert (closed["strict"], closed["schema"]) == (True, Verdict.model_json_schema())
    assert ("strict" in loose, loose["schema"]["required"]) == (False, ["score"])
    assert answer.value.why == "no reason"


@pytest.mark.parametrize("first", [HELLO, [{"role": "system", "content": "Be fair."}, *HELLO]])
async def test_where_a_schema_is_rejected_it_is_written_into_the_messages_from_then_on(first: list[Any]) -> None:
    def script(request: LlmRequest) -> LlmReply:
        return fails(400, "response_format is not supported") if "response_format" in request.body else says(GOOD)

    with scripted_llm(script) as endpoint:
        await llm_at(endpoint).ask(first, Verdict)
        await llm_at(endpoint).ask(first, Verdict)
        assert ["response_format" in request.body for request in endpoint.requests] == [True, False, False]
        system = endpoint.requests[-1].messages[0]
        assert system["role"] == "system" and '"score"' in system["content"]
        assert ("Be fair." in system["content"], len(endpoint.requests[-1].messages)) == (first is not HELLO, 2)


@ROUTES
async def test_parameters_of_litellm_and_the_key_arrive(model: str) -> None:
    with scripted_llm([says("fine")]) as endpoint:
        llm = llm_at(endpoint, model, api_key="key-of-the-judge", temperature=0.25, extra_body={"top_k": 3})
        answer = await llm.ask_text(HELLO)
        await llm_at(endpoint, model).ask_text(HELLO)
    (request, without) = endpoint.requests
    assert (answer.value, answer.text) == ("fine", "fine")
    assert (request.path, request.body["model"]) == ("/v1/chat/completions", "judge")
    assert (request.body["temperature"], request.body["top_k"]) == (0.25, 3)
    assert request.headers["authorization"] == "Bearer key-of-the-judge"
    assert "key-of-the-judge" not in without.headers["authorization"]


async def test_no_more_requests_than_concurrency_are_in_flight() -> None:
    with scripted_llm([says("fine", seconds=0.05)]) as endpoint:
        llm = llm_at(endpoint, concurrency=3)
        await asyncio.gather(*(llm.ask_text([{"role": "user", "content": str(n)}]) for n in range(12)))
    assert (len(endpoint.requests), endpoint.max_concurrency) == (12, 3)


async def test_a_lone_surrogate_is_replaced_and_messages_that_are_no_json_are_refused() -> None:
    with scripted_llm([says("fine")]) as endpoint:
        await llm_at(endpoint).ask_text([{"role": "user", "content": "a\ud800b\x00c"}])
        with pytest.raises(ConfigError, match="JSON"):
            await llm_at(endpoint).ask_text([{"role": "user", "content": object()}])
        with pytest.raises(ConfigError, match="at least one"):
            await llm_at(endpoint).ask_text([])
    assert endpoint.requests[0].messages[0]["content"] == "a\ufffdb\x00c"


async def test_a_provider_that_litellm_does_not_know_is_a_wrong_option() -> None:
    with pytest.raises(ConfigError, match=r"no provider of 'nobody/model'"):
        await Llm("nobody/model", cache=None).ask_text(HELLO)


async def test_without_a_key_the_provider_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(LlmError) as raised:
        await Llm("openai/o3", cache=None).ask_text(HELLO)
    assert raised.value.kind == "authentication"


async def test_what_litellm_prints_stays_off_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with scripted_llm([fails(400, "wrong")]) as endpoint, pytest.raises(LlmError):
        await llm_at(endpoint).ask_text(HELLO)
    with pytest.raises(ConfigError):
        await Llm("nobody/model", cache=None).ask_text(HELLO)
    assert capfd.readouterr().out == ""
    assert spending().total.requests > 0


async def test_anthropics_own_protocol_takes_the_schema_and_counts_its_tokens() -> None:
    content = [{"type": "text", "text": GOOD}]
    body = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "content": content}
    body |= {"stop_reason": "end_turn", "usage": {"input_tokens": 7, "output_tokens": 3}}
    reply = sends(json.dumps(body), headers={"content-type": "application/json"})
    with scripted_llm([fails(529, "overloaded"), reply]) as endpoint:
        base = endpoint.url.removesuffix("/v1")
        llm = Llm("anthropic/claude-sonnet-4-5", api_base=base, api_key="key-of-claude", cache=None, retries=2)
        answer = await llm.ask(HELLO, Verdict)
    assert [request.path for request in endpoint.requests] == ["/v1/messages"] * 2
    assert (answer.value.score, answer.tokens) == (0.5, Tokens(7, 3))
    assert answer.cost == pytest.approx(7 * 3e-6 + 3 * 15e-6)
    assert '"score"' in json.dumps(endpoint.requests[0].body)
