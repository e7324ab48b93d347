"""The page of a route's takeover."""

from __future__ import annotations

import re

from offbook_production.takeover import Takeover, Takeovers
from offbook_production.wing import ProductionWing
from offbook_production.wire import TakeoverRule
from tests.dashboard.conftest import PLANTED
from tests.fakes.gateway import Gateway

PAGE = "/takeovers/order-desk"


async def text_of(gateway: Gateway, path: str) -> str:
    page = await gateway.http.get(path)
    assert page.status_code == 200, page.text
    return page.text


def takeovers(gateway: Gateway) -> Takeovers:
    production = gateway.services.wings["production"]
    assert isinstance(production, ProductionWing)
    return production.takeovers


async def scored(gateway: Gateway, route: str = "order-desk", model: str = "desk@7") -> Takeover:
    """A takeover in which the small model has half of 40 right, and the paid one all."""
    takeover = await takeovers(gateway).opened(route)
    await takeover.start(TakeoverRule(share=0.5, threads=20), model)
    for number in range(100):
        small = takeover.asks_small(f"t-{number}")
        takeover._add(float(not small or number % 2), small, 0)
        if not takeover.active:
            break
    takeover.add_call(None)
    await takeover.save()
    return takeover


async def test_the_page_has_each_decision_with_its_numbers(gateway: Gateway) -> None:
    numbers = (await scored(gateway)).state.decisions[-1].numbers
    page = await text_of(gateway, PAGE)
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', page)
    assert len(rows) == 2 and "left" in rows[0] and "started" in rows[1]
    assert "not shown to be worse by less than 0.1" in rows[0]
    assert f"<small>of {numbers.small}</small>" in rows[0] and ">1.000 <small>of" in rows[0]
    assert "0 %" in page and f"{numbers.small} small" in page and f"{numbers.paid} paid" in page


async def test_a_takeover_that_runs_has_the_numbers_of_now(gateway: Gateway) -> None:
    takeover = await takeovers(gateway).opened("order-desk")
    assert "No takeover has begun" in await text_of(gateway, PAGE)
    await takeover.start(TakeoverRule(), "desk@7")
    takeover.add_call("late")
    page = await text_of(gateway, PAGE)
    assert '<th scope="row">now</th>' in page and "late 1" in page


async def test_the_first_page_leads_to_each_route(gateway: Gateway) -> None:
    assert "/takeovers/" not in await text_of(gateway, "/")
    takeover = await takeovers(gateway).opened("order-desk")
    await takeover.start(TakeoverRule(), "desk@7")
    page = await text_of(gateway, "/")
    assert f'href="{PAGE}"' in page and "desk@7 answers 10 % of new threads" in page


async def test_without_the_route_the_page_says_so(gateway: Gateway) -> None:
    page = await gateway.http.get(PAGE)
    assert page.status_code == 404 and "no route &#39;order-desk&#39;" in page.text


async def test_markup_in_names_and_reasons_stays_text(gateway: Gateway) -> None:
    takeover = await scored(gateway, PLANTED, PLANTED)
    takeover.add_call(PLANTED)
    first = await text_of(gateway, "/")
    [link] = re.findall(r'href="(/takeovers/[^"]+)"', first)
    for page in (first, await text_of(gateway, link)):
        assert PLANTED not in page and "&lt;script&gt;document.title" in page
        assert " style=" not in page and " onclick" not in page
