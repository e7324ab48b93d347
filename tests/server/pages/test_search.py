"""Searching rollouts: each filter, paging in the address, and what was typed wrongly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fakes.gateway import Gateway
from tests.server.pages.test_runs_page import finish, record


async def found(gateway: Gateway, **query: Any) -> list[str]:
    page = await gateway.http.get("/search", params=query)
    assert page.status_code == 200, page.text
    return re.findall(r'<a href="/trajectories/([^"]+)"', page.text)


@pytest.fixture
async def three(gateway: Gateway) -> Gateway:
    error = {"type": "ToolError", "message": "<b>the till is shut</b> 100%", "traceback": "..."}
    await finish(
        gateway,
        record("a", 0.25, place={"run": "one", "step": 1}),
        record("b", 0.75, place={"run": "two", "step": 2}, metadata={"note": 'say "hello"\nöl'}),
        record("c", None, place={"run": "two", "step": 2, "split": "val"}, exception=error),
    )
    return gateway


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, ["c", "b", "a"]),
        ({"run": "two"}, ["c", "b"]),
        ({"step": "1"}, ["a"]),
        ({"split": "val"}, ["c"]),
        ({"lowest": "0.25", "highest": "0.5"}, ["a"]),
        ({"outcome": "failed"}, ["c"]),
        ({"outcome": "finished"}, ["b", "a"]),
        ({"exception": "toolerr"}, ["c"]),
        ({"text": "TILL is shut"}, ["c"]),
        ({"text": "100%"}, ["c"]),
        ({"text": "1_0%"}, []),
        ({"text": 'say "hello"'}, ["b"]),
        ({"text": "öl"}, ["b"]),
        ({"model": "default"}, ["c", "b", "a"]),
        ({"model": "other"}, []),
    ],
)
async def test_each_filter_finds_what_fits(three: Gateway, query: dict[str, str], ids: list[str]) -> None:
    assert await found(three, **query) == ids


async def test_an_answer_and_a_called_tool_are_found(gateway: Gateway) -> None:
    answer = await gateway.chat({"x-offbook-trajectory": "t-1"})
    assert answer.status_code == 200
    await finish(gateway, record("t-1"), record("t-2"))
    words = answer.json()["choices"][0]["message"]["content"]
    assert await found(gateway, text=words.upper()) == ["t-1"]
    assert await found(gateway, tool="no_such_tool") == []


async def test_pages_follow_each_other_and_repeat_nothing(gateway: Gateway) -> None:
    await finish(gateway, *(record(f"r-{number}") for number in range(120)))
    seen: list[str] = []
    path: str | None = "/search?run=run-1"
    while path:
        page = (await gateway.http.get(path)).text
        seen += re.findall(r'<a href="/trajectories/([^"]+)"', page)
        link = re.search(r'<a href="([^"]+)" rel="next"', page)
        path = link[1].replace("&amp;", "&") if link else None
    assert seen == [f"r-{number}" for number in reversed(range(120))]


async def test_what_is_no_number_is_named_and_left_out(three: Gateway) -> None:
    page = await three.http.get("/search", params={"step": "x", "lowest": "nan", "outcome": "<script>"})
    assert page.status_code == 200
    assert "step &#39;x&#39; is not a number; lowest reward &#39;nan&#39; is not a number" in page.text
    assert "<script>" not in page.text.partition("</head>")[2]


async def test_an_error_with_markup_stays_text(three: Gateway) -> None:
    page = await three.http.get("/search")
    assert "<b>the till" not in page.text and "&lt;b&gt;the till is shut" in page.text
