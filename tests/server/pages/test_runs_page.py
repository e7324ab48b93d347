"""The runs page, over records that were written through the server's API."""

from __future__ import annotations

from typing import Any

from tests.fakes.gateway import Gateway


def record(name: str, reward: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    place = {"run": "run-1", "split": "train", "step": 0, "scenario": "s", "group": "g-1", "index": 0}
    return {
        "id": name,
        "model": "default",
        "reward": reward,
        "started_at": 1_700_000_000.0,
        "ended_at": 1_700_000_002.0,
        "place": place | fields.pop("place", {}),
    } | fields


async def finish(gateway: Gateway, *records: dict[str, Any]) -> None:
    answer = await gateway.http.post("/api/trajectories", json={"trajectories": list(records)})
    assert answer.status_code == 200, answer.text


async def test_runs_are_listed_newest_first_with_their_rollouts(gateway: Gateway) -> None:
    await finish(gateway, record("a"), record("b"))
    await finish(gateway, record("c", place={"run": "run-2"}))
    page = await gateway.http.get("/")
    assert page.status_code == 200
    assert page.text.index("run-2") < page.text.index("run-1")
    assert 'href="/runs/run-1"' in page.text


async def test_a_name_that_is_markup_stays_text(gateway: Gateway) -> None:
    name = "<script>alert(1)</script>/~x"
    await finish(gateway, record("a", place={"run": name}))
    page = await gateway.http.get("/")
    assert "<script>alert" not in page.text and "&lt;script&gt;alert(1)" in page.text
    found = await gateway.http.get("/runs/%3Cscript%3Ealert%281%29%3C~2Fscript%3E~2F~7Ex")
    assert found.status_code == 200 and "<script>alert" not in found.text


async def test_an_unknown_run_is_a_page_that_says_so(gateway: Gateway) -> None:
    page = await gateway.http.get("/runs/nowhere")
    assert page.status_code == 404 and "There is no run &#39;nowhere&#39; here" in page.text


async def test_pages_carry_the_policy_and_no_inline_script_or_style(gateway: Gateway) -> None:
    await finish(gateway, record("a"))
    for path in ("/", "/runs/run-1"):
        page = await gateway.http.get(path)
        assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
        assert " style=" not in page.text and "<style" not in page.text and " onclick" not in page.text
