"""Tokens as providers say them, and what they cost: against hand-computed sums and litellm's own calculator."""

from __future__ import annotations

from typing import Any

import pytest

from offbook.base.errors import BudgetExceeded
from offbook.llms import LlmOptions, Price, Spending, budget
from offbook.llms.ledger import SpendingFile
from offbook.llms.prices import UsedTokens, cost_of, price_of, used_tokens
from offbook.llms.provider import installed_prices
from offbook.testing import LlmReply, says, scripted_llm

from .asking import GOOD, HELLO, Verdict, llm_at

CLAUDE = {
    "input_tokens": 1000,
    "cache_creation_input_tokens": 100_000,
    "cache_read_input_tokens": 5000,
    "output_tokens": 100,
}
"""As Anthropic's API counts: what is read from the cache or written there is beside `input_tokens`."""


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        ({"usage": CLAUDE}, UsedTokens(106_000, 100, 5000, 100_000)),
        (
            {
                "usage": CLAUDE
                | {"cache_creation": {"ephemeral_5m_input_tokens": 40_000, "ephemeral_1h_input_tokens": 60_000}}
            },
            UsedTokens(106_000, 100, 5000, 100_000, 60_000),
        ),
        (  # OpenRouter before Claude, cold: the prompt includes what is written
            {
                "usage": {
                    "prompt_tokens": 25_612,
                    "completion_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 25_600},
                    "cost": 0.033,
                }
            },
            UsedTokens(25_612, 9, 0, 25_600),
        ),
        (  # OpenAI's Responses
            {
                "usage": {
                    "input_tokens": 30,
                    "input_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 15},
                    "output_tokens": 7,
                    "output_tokens_details": {"reasoning_tokens": 0},
                }
            },
            UsedTokens(30, 7, 10, 15),
        ),
        (  # a proxy that forgets that thoughts are completion tokens
            {
                "usage": {
                    "prompt_tokens": 21,
                    "completion_tokens": 0,
                    "total_tokens": 81,
                    "completion_tokens_details": {"reasoning_tokens": 60},
                }
            },
            UsedTokens(21, 60),
        ),
        (  # a server that counts chat completions as the Responses API does
            {"usage": {"input_tokens": 12, "output_tokens": 3, "prompt_tps": 88.1, "peak_memory": 5.2}},
            UsedTokens(12, 3),
        ),
        (  # vLLM and Azure leave details out, or null
            {
                "usage": {
                    "prompt_tokens": 12,
                    "total_tokens": 15,
                    "completion_tokens": 3,
                    "prompt_tokens_details": None,
                }
            },
            UsedTokens(12, 3),
        ),
        (  # Gemini with a tool of Google's: its results are read too
            {
                "usageMetadata": {
                    "promptTokenCount": 4583,
                    "cachedContentTokenCount": 2047,
                    "toolUsePromptTokenCount": 100,
                    "candidatesTokenCount": 325,
                    "thoughtsTokenCount": 874,
                    "totalTokenCount": 5882,
                    "trafficType": "ON_DEMAND",
                }
            },
            UsedTokens(4683, 1199, 2047),
        ),
        ({"usage": {"prompt_tokens": 5.0, "completion_tokens": 2.0}}, UsedTokens(5, 2)),
        ({"usage": None}, None),
        ({}, None),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 0}}, None),
    ],
)
def test_tokens_are_read_as_each_provider_says_them(answer: dict[str, Any], used: UsedTokens | None) -> None:
    assert used_tokens(answer) == used


@pytest.mark.parametrize("wrong", [-35, 1.5, 1e308, float("nan"), True, "5", 10**30, {"n": 1}, [1]])
@pytest.mark.parametrize(
    "usage",
    [
        {"usage": {"prompt_tokens": 1151, "completion_tokens": "?"}},
        {"usage": {"prompt_tokens": "?", "completion_tokens": 7}},
        {"usage": {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": "?"}}},
        {"usage": {"input_tokens": 30, "output_tokens": 7, "cache_creation_input_tokens": "?"}},
        {"usage": {"input_tokens": 30, "output_tokens": 7, "cache_creation": {"ephemeral_1h_input_tokens": "?"}}},
        {"usageMetadata": {"promptTokenCount": 30, "thoughtsTokenCount": "?"}},
    ],
)
def test_what_is_no_count_of_tokens_is_an_error_that_names_its_field(usage: dict[str, Any], wrong: Any) -> None:
    def with_wrong(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_wrong(inner) for name, inner in value.items()}
        return wrong if value == "?" else value

    with pytest.raises(ValueError, match="no number of tokens"):
        used_tokens(with_wrong(usage))


@pytest.mark.parametrize(
    "usage",
    [
        "much",
        [7],
        {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": "none"},
        {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 25_600}},
    ],
)
def test_usage_of_no_known_shape_is_an_error(usage: Any) -> None:
    with pytest.raises(ValueError, match=r"usage|details"):
        used_tokens({"usage": usage})


def test_what_is_written_to_the_cache_has_a_price_of_its_own() -> None:
    price = Price(prompt=3.0, completion=15.0, cached_prompt=0.3, cache_write=3.75, cache_write_1h=6.0)
    assert cost_of(UsedTokens(100_000, 100, 0, 100_000), price) == pytest.approx(0.3765)
    assert cost_of(UsedTokens(100_000, 100, 0, 100_000, 100_000), price) == pytest.approx(0.6015)
    assert cost_of(UsedTokens(100_000, 100, 0, 100_000), Price(prompt=3, completion=15)) == pytest.approx(0.3015)


@pytest.mark.parametrize(
    ("model", "usage"),
    [
        ("anthropic/claude-sonnet-4-5", CLAUDE),
        (
            "anthropic/claude-sonnet-4-5",
            CLAUDE | {"cache_creation": {"ephemeral_5m_input_tokens": 40_000, "ephemeral_1h_input_tokens": 60_000}},
        ),
        ("openai/gpt-4.1", {"prompt_tokens": 1000, "completion_tokens": 50, "cached": 600}),
        ("gemini/gemini-2.5-pro", {"prompt_tokens": 1000, "completion_tokens": 50, "cached": 600}),
    ],
)
def test_costs_are_those_of_litellms_own_calculator(litellm: Any, model: str, usage: dict[str, Any]) -> None:
    price = price_of(LlmOptions.of(model, {}), installed_prices())
    if price is None:
        pytest.fail(f"the table no longer has {model}: name a newer one")
    if "input_tokens" in usage:
        from litellm.llms.anthropic.chat.transformation import AnthropicConfig

        theirs = AnthropicConfig().calculate_usage(usage, reasoning_content=None)
    else:
        details = {"cached_tokens": usage.pop("cached")}
        usage = usage | {"prompt_tokens_details": details}
        theirs = litellm.Usage(total_tokens=usage["prompt_tokens"] + usage["completion_tokens"], **usage)
    used = used_tokens({"usage": usage})
    assert used is not None and used == used_tokens({"usage": theirs.model_dump()})
    provider = model.partition("/")[0]
    cost = sum(litellm.cost_per_token(model, custom_llm_provider=provider, usage_object=theirs))
    assert cost_of(used, price) == pytest.approx(cost)


def test_every_entry_of_the_table_has_a_price_or_none() -> None:
    table = installed_prices()
    prices = [price_of(LlmOptions.model_construct(model=name, prices=None), table) for name in table]
    assert sum(price is not None for price in prices) > 1000


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
async def test_a_provider_that_says_negative_tokens_cannot_lift_a_budget(field: str) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15} | {field: -(10**6)}
    lying = LlmReply(completion={**(says(GOOD).completion or {}), "usage": usage})
    with scripted_llm([lying] * 20) as endpoint, budget(max_cost=0.1) as spent:
        llm = llm_at(endpoint, max_tokens=1000, prices={"prompt": 2.0, "completion": 40.0})
        for _ in range(2):
            answer = await llm.ask(HELLO, Verdict)
            assert (answer.tokens, answer.cost) == (None, None)
        with pytest.raises(BudgetExceeded):
            for _ in range(5):
                await llm.ask(HELLO, Verdict)
    assert (spent.total.uncounted, spent.total.cost) == (3, 0.0)


@pytest.mark.parametrize("cost", [-1e9, float("nan"), float("inf"), None])
async def test_a_cost_that_is_no_amount_is_charged_by_the_estimate(cost: float | None) -> None:
    ledger = Spending(1.0)
    async with ledger.reserved(1.0) as request:
        request.charge(cost)
    with pytest.raises(BudgetExceeded):
        async with ledger.reserved(0.1):
            pass


def test_a_stored_line_with_a_negative_cost_is_left_out(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "spent.jsonl"
    file.write_text(
        '{"purpose": "judge", "cost": 0.5}\n{"purpose": "judge", "cost": -99}\n{"purpose": "judge", "cost": NaN}\n'
    )
    assert SpendingFile(file).totals()["judge"].cost == 0.5
    assert "spent.jsonl:2: a damaged line was skipped" in caplog.text
