"""The page of a route's takeover, over the records of a real one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from offbook.base.takeovers import Decision, Numbers, TakeoverState
from offbook.server.records.notes import save_notes
from offbook.server.upstream.counts import RouteCounts
from offbook.server.views.numbers import MINUS
from offbook.server.views.takeover_view import paid_per_call, small_calls
from tests.fakes.gateway import Gateway
from tests.server.pages.conftest import PLANTED
from tests.server.pages.recorded_takeover import RUN, save_takeover

PAGE = "/takeovers/order-desk"


async def text_of(gateway: Gateway, path: str) -> str:
    page = await gateway.http.get(path)
    assert page.status_code == 200, page.text
    return page.text


def facts(page: str) -> dict[str, str]:
    """The facts at the top: name -> value and note."""
    shown = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page)
    return {name: re.sub(r"<[^>]+>", "", text) for name, text in shown}


async def test_the_page_has_the_recorded_decisions_with_their_numbers(gateway: Gateway) -> None:
    await save_takeover(gateway.services.store)
    page = await text_of(gateway, PAGE)
    decisions = page[page.index('id="decisions-h"') :]
    assert decisions.count('<tr><th scope="row">') == len(RUN["decisions"])
    newest = decisions.split("<tr>")[2]
    assert "drift: calls unlike those that were seen (longer): more than 20%" in newest and "✕ left" in newest
    assert ">1.000 <small>of 32</small><" in newest and ">0.872 <small>of 47</small><" in newest
    assert f"{MINUS}0.036 to +0.324" in newest and ">27</td>" in newest
    assert (
        decisions.index("drift:") < decisions.index("tools: more than 10%") < decisions.index("agree by less than 0.8")
    )


async def test_the_facts_are_stage_threads_calls_and_money(gateway: Gateway) -> None:
    await save_takeover(gateway.services.store)
    shown = facts(await text_of(gateway, PAGE))
    assert shown == {
        "Stage": "3 of 3 100 %",
        "Small model has": "0 % of threads, now",
        "Threads": "17 small 47 paid, in this takeover",
        "Small model&#39;s calls": "543 answered",  # 34 + 34 + 52 + 64, 32 + 221, 42 + 64
        "Paid model&#39;s calls": "6265 0 failed",
        "Paid": "0.520 USD 0.0831 USD per 1,000 calls",
        "Saved": "≈ 0.0451 USD an estimate",  # 543 * 0.5204 / 6265
    }


async def test_the_stages_are_those_of_the_present_takeover(gateway: Gateway) -> None:
    await save_takeover(gateway.services.store)
    page = await text_of(gateway, PAGE)
    stages = page[page.index('id="stages-h"') : page.index('id="decisions-h"')]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', stages, re.DOTALL)
    assert [name for name, _ in rows] == ["shadow", "25 %", "100 %"]
    assert "✓ passed" in rows[0][1] and "0.930 <small>of 57" in rows[0][1]
    assert (
        "✓ passed" in rows[1][1]
        and f"{MINUS}0.142 to +0.322" in rows[1][1]
        and '>17</td><td class="num">47<' in rows[1][1]
    )
    assert "✕ left" in rows[2][1]
    assert stages.count('class="limit"') == 4 and stages.count('class="span"') == 15  # limits of this takeover alone


async def test_the_first_page_leads_to_each_route(gateway: Gateway) -> None:
    assert "/takeovers/" not in await text_of(gateway, "/")
    await save_takeover(gateway.services.store)
    await gateway.services.store.write(save_notes, ("route:other", RouteCounts(calls=3).model_dump_json()))
    page = await text_of(gateway, "/")
    assert f'href="{PAGE}"' in page and "✕ left" in page and "order-desk@180 answers no thread" in page
    other = await text_of(gateway, "/takeovers/other")
    assert "No takeover has begun" in other and set(facts(other)) == {"Paid model&#39;s calls", "Paid"}


async def test_without_the_route_the_page_says_so(gateway: Gateway) -> None:
    page = await gateway.http.get(PAGE)
    assert page.status_code == 404 and "There is no route &#39;order-desk&#39; here." in page.text
    await save_takeover(gateway.services.store)
    page = await gateway.http.get("/takeovers/order-disk")
    assert page.status_code == 404 and "Did you mean &#39;order-desk&#39;?" in page.text


async def test_markup_in_names_and_reasons_stays_text(gateway: Gateway) -> None:
    numbers = Numbers(tested=1, lower=0.0, upper=1.0, calls=1, failed={PLANTED: 1})
    left = Decision(decided_at=1.0, stage=0, share=0.5, verdict="left", reason=PLANTED, numbers=numbers)
    await save_takeover(gateway.services.store, PLANTED, model=PLANTED, decisions=[left.model_dump()])
    first = await text_of(gateway, "/")
    [link] = re.findall(r'href="(/takeovers/[^"]+)"', first)
    for page in (first, await text_of(gateway, link)):
        assert PLANTED not in page and "&lt;script&gt;document.title" in page
        assert " style=" not in page and " onclick" not in page


async def test_older_decisions_are_on_pages_of_their_own(gateway: Gateway) -> None:
    await save_takeover(gateway.services.store, decisions=RUN["decisions"] * 3)
    first, last = await text_of(gateway, PAGE), await text_of(gateway, f"{PAGE}?at=2")
    assert "Page 1 of 2" in first and 'rel="next"' in first and 'rel="prev"' in last
    rows = [page[page.index('id="decisions-h"') :].count('<tr><th scope="row">') for page in (first, last)]
    assert rows == [50, 3 * len(RUN["decisions"]) - 50]


def state(*decisions: tuple[str, float, int], **fields: Any) -> TakeoverState:
    """A takeover with decisions of (verdict, share, calls), of which one call failed."""
    made = [
        {"decided_at": 1, "stage": 1, "share": share, "verdict": verdict, "reason": "", "numbers": numbers(calls)}
        for verdict, share, calls in decisions
    ]
    return TakeoverState.model_validate({"route": "r", "decisions": made} | fields)


def numbers(calls: int) -> dict[str, Any]:
    return {"calls": calls, "failed": {"late": 1} if calls else {}}


@pytest.mark.parametrize(
    ("taken", "calls"),
    [
        (state(("started", 0.0, 0), ("passed", 0.0, 9)), 0),  # unseen
        (state(("started", 0.5, 0), ("passed", 0.5, 5), ("approved", 0.5, 8), ("started", 1.0, 0)), 7),
        (state(("started", 1.0, 0), ("taken_over", 1.0, 5), ("round", 1.0, 11), ("round", 1.0, 21)), 10 + 20),
        (state(("started", 0.5, 0), status="running", share=0.5, numbers=numbers(4)), 3),
        (state(("started", 0.0, 0), status="running", share=0.0, numbers=numbers(4)), 0),
        (state(("started", 0.5, 0), ("left", 0.5, 4), status="left", numbers=numbers(4)), 3),
    ],
)
def test_calls_of_the_small_model_are_those_of_each_stage_that_it_answered(taken: TakeoverState, calls: int) -> None:
    assert small_calls(taken) == calls


def test_the_mean_price_leaves_out_calls_whose_price_is_unknown() -> None:
    assert paid_per_call(RouteCounts(calls=10, uncounted=3, unpriced=2, cost=1.0)) == 0.2
    assert paid_per_call(RouteCounts(calls=3, unpriced=3)) is None
    assert paid_per_call(RouteCounts()) is None
