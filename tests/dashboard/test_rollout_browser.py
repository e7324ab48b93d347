"""A rollout's and a group's page of a real run in Chromium: accessible, narrow enough, worked by keys, and text stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbook.server.records.overview import RolloutRow
from offbook_dashboard.page_urls import group_url, trajectory_url
from offbook_dashboard.source import DashboardSource
from tests.dashboard.browsing import LOOKS, expect, faults, opened, overflow, settle
from tests.dashboard.conftest import PLANTED
from tests.dashboard.recorded_run import RUN
from tests.dashboard.viewing import from_records, viewing

pytestmark = pytest.mark.slow("a browser")

COLOURS = ("advantage", "ratio", "logprob", "entropy", "none")


@pytest.fixture
def pages(widest: RolloutRow, recorded: Path) -> dict[str, str]:
    """Addresses by name. The tokens of step 0 are no longer kept, those of an evaluation never were."""
    rollout = trajectory_url(widest.id)
    first = from_records(recorded, lambda source: source.rollouts(RUN, 0))
    return {
        "rollout": rollout,
        "group": group_url(RUN, widest.step, widest.group),
        "swept": trajectory_url(next(row.id for row in first if row.split == "train")),
        "evaluation": trajectory_url(next(row.id for row in first if row.split == "val")),
        **{colour: f"{rollout}?colour={colour}" for colour in COLOURS},
    }


@pytest.mark.parametrize(("scheme", "size"), LOOKS)
@pytest.mark.parametrize("name", ["rollout", "group", *COLOURS, "swept", "evaluation"])
def test_a_page_is_accessible_fits_and_says_nothing_on_its_console(
    pages: dict[str, str], dashboard: str, chromium: Any, axe: str, name: str, scheme: str, size: str
) -> None:
    with opened(chromium, dashboard + pages[name], scheme=scheme, size=size) as (page, said):
        assert faults(page, axe) == []
        assert overflow(page) == 0
        if page.locator(".tokens").count():
            page.locator(".tokens span").first.click()
            expect(page.locator("#token dl")).to_be_visible()
            assert faults(page, axe) == []
            assert overflow(page) == 0
        assert said == []


def test_the_tokens_of_a_swept_step_show_what_was_sampled_and_why_no_more(
    pages: dict[str, str], dashboard: str, chromium: Any
) -> None:
    with opened(chromium, dashboard + pages["swept"]) as (page, _):
        reasons = "have been deleted|trained nothing in its step|rewards of each group"
        assert [each for each in reasons.split("|") if each in page.locator(".why").inner_text()]
        page.locator(".tokens span").first.click()
        expect(page.locator("#token")).to_contain_text("Logprob, sampler")
        expect(page.locator("#token")).not_to_contain_text("Logprob, learner")


def test_keys_walk_the_tokens_and_the_panel_shows_their_numbers(
    pages: dict[str, str], dashboard: str, chromium: Any
) -> None:
    with opened(chromium, dashboard + pages["rollout"]) as (page, said):
        data = json.loads(page.locator("#token-data").text_content())
        box, panel = page.locator(".tokens").first, page.locator("#token")
        size = len(data[0]["ids"])
        box.focus()
        for key, at in (("ArrowRight", 0), ("ArrowRight", 1), ("End", size - 1), ("ArrowLeft", size - 2), ("Home", 0)):
            page.keyboard.press(key)
            expect(panel).to_contain_text(f"Token{at + 1} of {size}")
            expect(box).to_have_attribute("aria-activedescendant", f"t0-{at}")
            expect(box.locator("span").nth(at)).to_have_attribute("aria-selected", "true")
            numbers = {"Id": str(data[0]["ids"][at]), "Call": "1"}
            for name, column, places in (
                ("Logprob, sampler", "recorded", 4),
                ("Logprob, learner", "logprob", 4),
                ("Ratio to sampler", "ratio", 3),
            ):
                numbers[name] = shown(data[0][column][at], places)
            terms = panel.locator("dt").all_inner_texts()
            values = panel.locator("dd").all_inner_texts()
            assert numbers.items() <= dict(zip(terms, values, strict=True)).items()
        page.keyboard.press("ArrowDown")
        expect(panel).not_to_contain_text(f"Token1 of {size}")
        linked = page.url
        assert "#t0-" in linked
        page.keyboard.press("Escape")
        expect(panel).to_contain_text("Select a sampled token")
        page.goto("about:blank")
        page.goto(linked)
        settle(page)
        expect(page.locator(linked[linked.index("#") :])).to_have_attribute("aria-selected", "true")
        assert said == []


def shown(value: float, places: int) -> str:
    """A number as the panel writes it."""
    return f"{round(value, places) + 0.0:.{places}f}".replace("-", "\N{MINUS SIGN}")


def test_on_a_phone_a_tokens_numbers_are_a_sheet_that_leaves_the_token_in_sight(
    pages: dict[str, str], dashboard: str, chromium: Any
) -> None:
    with opened(chromium, dashboard + pages["rollout"], size="phone") as (page, said):
        page.locator(".tokens").last.locator("span").last.click()
        sheet = page.locator("#token")
        expect(sheet).to_be_visible()
        token, covered = page.locator(".t.cur").bounding_box(), sheet.bounding_box()
        assert token["y"] + token["height"] <= covered["y"]
        page.get_by_role("button", name="Close").click()
        expect(sheet).to_be_hidden()
        assert said == []


def test_a_groups_rows_lead_to_its_rollouts(pages: dict[str, str], dashboard: str, chromium: Any) -> None:
    with opened(chromium, dashboard + pages["group"]) as (page, said):
        page.keyboard.press("j")
        expect(page.locator("table.rows tbody a").first).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#transcript-h")).to_be_visible()
        settle(page)
        page.keyboard.press("u")
        expect(page).to_have_url(dashboard + pages["group"])
        assert said == []


def test_markup_in_a_tools_result_a_name_and_an_error_stays_text(planted: Path, chromium: Any) -> None:
    rollout, group = from_records(planted, with_a_tool)
    with viewing(planted) as url:
        for path in (rollout, group):
            with opened(chromium, url + path) as (page, said):
                text = page.locator("main").inner_text()
                assert text.count(PLANTED) >= 2, path  # the scenario's name and a tool's result
                assert page.title() != "planted"
                assert page.locator("main script:not([type])").count() == 0
                assert said == []
        with opened(chromium, url + group) as (page, said):
            page.locator(".chips .failed").first.click()
            expect(page.locator(".failure").first).to_contain_text("<script>1</script>")
            assert said == []


async def with_a_tool(source: DashboardSource) -> tuple[str, str]:
    """The pages of a rollout of step 1 that used a tool, and of its group."""
    for row in await source.rollouts(PLANTED, 1):
        found = await source.trajectory(row.id)
        if found is not None and any(m["role"] == "tool" for call in found.calls for m in call.messages):
            return trajectory_url(row.id), group_url(PLANTED, 1, row.group)
    raise AssertionError("no rollout of step 1 used a tool")
