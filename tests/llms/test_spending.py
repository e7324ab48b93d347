"""What questions cost, by purpose, and the budget that ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from offbook.base.errors import BudgetExceeded, ConfigError, LlmError
from offbook.llms import LlmOptions, Price, Spending, budget, spending
from offbook.llms.prices import UsedTokens, cost_of, estimate, price_of
from offbook.testing import LlmReply, LlmRequest, fails, hangs, refuses, says, scripted_llm

from .asking import GOOD, HELLO, Verdict, llm_at

DOLLAR_A_CALL = {"prompt": 0, "completion": 1_000_000 / 5}
"""An answer of 5 tokens, as the scripted endpoint tells them, costs 1 USD."""


def ask_many(llm: Any, count: int) -> Any:
    """Different questions, all at once; errors are values."""
    questions = (llm.ask([{"role": "user", "content": str(n)}], Verdict) for n in range(count))
    return asyncio.gather(*questions, return_exceptions=True)


async def test_tokens_and_costs_are_summed_by_purpose() -> None:
    with scripted_llm([says(GOOD, usage=(1000, 100))]) as endpoint, budget() as spent:
        llm = llm_at(endpoint, prices={"prompt": 2.0, "completion": 8.0})
        answer = await llm.ask(HELLO, Verdict)
        await llm.ask(HELLO, Verdict, purpose="comparison")
        await llm.ask_text(HELLO, purpose="comparison")
    assert answer.cost == pytest.approx(0.0028)
    comparison = spent.by_purpose()["comparison"]
    assert (comparison.questions, comparison.requests) == (2, 2)
    assert (comparison.prompt_tokens, comparison.completion_tokens) == (2000, 200)
    assert comparison.cost == pytest.approx(0.0056)
    metrics = spent.metrics()
    assert (metrics["costs/judge"], metrics["tokens/judge/prompt"]) == (pytest.approx(0.0028), 1000)
    assert spent.lines()[1] == "comparison: 2 questions, 2 requests, 2,000 + 200 tokens, 0.0056 USD"


async def test_a_price_is_looked_up_by_the_name_that_was_asked_for() -> None:
    with scripted_llm([says(GOOD, usage=(1000, 100), model="gpt-4o")]) as endpoint:
        assert (await llm_at(endpoint, "openai/o3").ask(HELLO, Verdict)).cost == pytest.approx(0.0028)
        assert (await llm_at(endpoint, "openai/judge").ask(HELLO, Verdict)).cost is None


async def test_unknown_prices_and_tokens_are_counted_and_never_zero() -> None:
    with scripted_llm([says(GOOD), says(GOOD, usage=None)]) as endpoint, budget() as spent:
        await llm_at(endpoint).ask(HELLO, Verdict)
        untold = await llm_at(endpoint, prices={"prompt": 1, "completion": 1}).ask(HELLO, Verdict)
    assert (untold.tokens, untold.cost) == (None, None)
    metrics = spent.metrics()
    assert "costs/judge" not in metrics
    assert (metrics["llms/judge/unpriced"], metrics["llms/judge/uncounted"]) == (2, 1)
    assert spent.lines() == ["judge: 2 questions, 2 requests, 10 + 5 tokens, 2 requests of unknown price"]


async def test_what_failed_is_counted_with_what_it_cost() -> None:
    script = [fails(500), refuses("no")]
    with scripted_llm(script) as endpoint, budget() as spent, pytest.raises(LlmError):
        await llm_at(endpoint, prices=DOLLAR_A_CALL).ask(HELLO, Verdict)
    assert (spent.total.questions, spent.total.requests, spent.total.failed) == (1, 2, 1)
    assert (spent.total.prompt_tokens, spent.total.completion_tokens, spent.total.cost) == (10, 5, pytest.approx(1))


async def test_blocks_count_also_for_those_around_them() -> None:
    process = spending()
    before = process.total.requests
    with scripted_llm([says(GOOD)]) as endpoint, budget() as outer:
        with budget() as inner:
            await llm_at(endpoint).ask(HELLO, Verdict)
            assert spending() is inner
        await asyncio.create_task(llm_at(endpoint).ask(HELLO, Verdict))
    assert (inner.total.requests, outer.total.requests, process.total.requests - before) == (1, 2, 2)
    assert spending() is process


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("max_cost", [0.5, 3.0, 3.5])
async def test_a_budget_stops_within_one_call_of_the_amount(max_cost: float, concurrency: int) -> None:
    with scripted_llm([says(GOOD, seconds=0.01)]) as endpoint, budget(max_cost) as spent:
        answers = await ask_many(llm_at(endpoint, prices=DOLLAR_A_CALL, concurrency=concurrency, max_tokens=5), 12)
    ends = [answer for answer in answers if isinstance(answer, BaseException)]
    assert {type(end) for end in ends} == {BudgetExceeded}
    assert max_cost <= spent.total.cost < max_cost + 1
    assert (len(endpoint.requests), len(ends)) == (spent.total.cost, 12 - spent.total.cost)
    assert (ends[0].max_cost, f"max_cost={max_cost:g} USD" in str(ends[0])) == (max_cost, True)  # type: ignore[attr-defined]


async def test_requests_run_side_by_side_while_the_budget_is_far() -> None:
    with scripted_llm([says(GOOD, seconds=0.05)]) as endpoint, budget(1000):
        answers = await ask_many(llm_at(endpoint, prices=DOLLAR_A_CALL, max_tokens=5), 8)
    assert (endpoint.max_concurrency > 3, [answer.cost for answer in answers]) == (True, [1.0] * 8)


async def test_an_answer_without_usage_is_charged_by_the_estimate() -> None:
    with scripted_llm([says(GOOD, usage=None)]) as endpoint, budget(2.5) as spent:
        answers = await ask_many(llm_at(endpoint, prices=DOLLAR_A_CALL, max_tokens=5), 8)
    assert (len(endpoint.requests), spent.total.unpriced) == (3, 3)
    assert sum(isinstance(answer, BudgetExceeded) for answer in answers) == 5


async def test_a_budget_holds_in_the_blocks_inside_it() -> None:
    with scripted_llm([says(GOOD)]) as endpoint, budget(1), budget(100):
        llm = llm_at(endpoint, prices=DOLLAR_A_CALL)
        await llm.ask(HELLO, Verdict)
        with pytest.raises(BudgetExceeded, match="max_cost=1 USD"):
            await llm.ask(HELLO, Verdict)


async def test_a_request_that_is_cancelled_or_fails_frees_its_part_of_the_budget() -> None:
    def script(request: LlmRequest) -> LlmReply:
        return {"hang": hangs(), "fail": fails(400)}.get(request.messages[0]["content"], says(GOOD))

    with scripted_llm(script) as endpoint, budget(1.5) as spent:
        llm = llm_at(endpoint, prices=DOLLAR_A_CALL, max_tokens=10)
        hanging = asyncio.create_task(llm.ask([{"role": "user", "content": "hang"}], Verdict))
        async with asyncio.timeout(20):
            while not endpoint.requests:
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(llm.ask(HELLO, Verdict))
        await asyncio.sleep(0)
        hanging.cancel()
        assert (await waiting).cost == 1.0
        with pytest.raises(LlmError):
            await llm.ask([{"role": "user", "content": "fail"}], Verdict)
        assert (await llm.ask(HELLO, Verdict)).cost == 1.0
    assert spent.total.cost == 2.0


async def test_a_budget_without_a_price_is_refused_before_anything_is_asked() -> None:
    with scripted_llm([says(GOOD)]) as endpoint, budget(1):
        with pytest.raises(ConfigError, match=r"max_cost needs the price of 'openai/judge'.*prices="):
            await llm_at(endpoint).ask(HELLO, Verdict)
        assert (await llm_at(endpoint, prices={"prompt": 0, "completion": 0}).ask(HELLO, Verdict)).cost == 0.0
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("amount", [0, -1, float("nan"), float("inf"), True, "5"])
def test_an_amount_that_is_none_is_refused(amount: Any) -> None:
    with pytest.raises(ConfigError, match="max_cost: USD above 0"), budget(amount):
        pass


def test_prices_by_hand() -> None:
    price = Price(prompt=2.0, completion=8.0, cached_prompt=0.5)
    assert cost_of(UsedTokens(1000, 10, 600), price) == pytest.approx((400 * 2 + 600 * 0.5 + 10 * 8) / 1e6)
    table = {"o3": {"litellm_provider": "openai", "input_cost_per_token": 2e-6, "output_cost_per_token": 8e-6}}
    assert price_of(LlmOptions.of("openai/o3", {}), table) == Price(prompt=2.0, completion=8.0)
    assert price_of(LlmOptions.of("hosted_vllm/o3", {}), table) is None
    assert estimate(LlmOptions.of("openai/o3", {"max_tokens": 100}), 3998, price) == pytest.approx(0.0048)


async def test_the_ledger_waits_without_a_loop_of_its_own() -> None:
    ledger = Spending(1.0)
    async with ledger.reserved(2.0) as first:
        second = asyncio.create_task(ledger.reserved(0.1).__aenter__())
        await asyncio.sleep(0.01)
        assert not second.done()
        first.charge(0.25)
    await asyncio.wait_for(second, 5)
