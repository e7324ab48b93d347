"""The overview pages of a real run in Chromium: nothing on the console, nothing too wide, nothing that axe finds serious."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browsing import LOOKS, expect, faults, opened, overflow, painted, settle
from tests.dashboard.recorded_run import RUN
from tests.dashboard.viewing import viewing

pytestmark = pytest.mark.slow("a browser")

PAGES = {
    "runs": "/",
    "run": f"/runs/{RUN}",
    "step": f"/runs/{RUN}/steps/1",
    "evaluation": f"/runs/{RUN}/steps/3?split=val",
    "compare": f"/compare?run={RUN}&run={RUN}",
    "nothing": "/runs/no-such-run",
}


@pytest.mark.parametrize(("scheme", "size"), LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_fits_and_says_nothing_on_its_console(
    dashboard: str, chromium: Any, axe: str, name: str, scheme: str, size: str
) -> None:
    with opened(chromium, dashboard + PAGES[name], scheme=scheme, size=size) as (page, said):
        assert faults(page, axe) == []
        assert overflow(page) == 0
        expected = ["404"] if name == "nothing" else []
        assert [line for line in said if not any(part in line for part in expected)] == []


WRITTEN = """() => {
  const figures = (window.written = new Map());
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
    const title = this.canvas.closest('figure')?.querySelector('figcaption')?.firstChild.textContent;
    figures.set(title, [...(figures.get(title) ?? []), text]);
    return fillText.call(this, text, ...where);
  };
}"""
"""Collects the texts that charts write, by their titles."""


def test_a_chart_of_nothing_but_zeros_ends_at_one_and_a_table_that_is_cut_shows_it(
    dashboard: str, chromium: Any
) -> None:
    with opened(chromium, dashboard + PAGES["run"]) as (page, _):
        expect(page.locator("figure canvas").nth(7)).to_be_visible()
        page.evaluate(WRITTEN)
        page.locator("#theme").select_option("dark")
        page.wait_for_function("() => window.written.size >= 8")
        zeros = page.evaluate(
            """() => JSON.parse(document.getElementById('chart-data').textContent)[0].charts
              .filter((chart) => chart.parts.every((part) => part.y.every((value) => !value))).map((chart) => chart.title)"""
        )
        assert zeros, "no chart of the run is all zero"
        for title in zeros:
            assert "100" not in page.evaluate("(title) => window.written.get(title)", title)
    with opened(chromium, dashboard + "/", size="phone") as (page, _):
        width, shown, shades = page.evaluate(
            """() => {
              const box = document.querySelector('.scroll');
              return [box.scrollWidth, box.clientWidth, getComputedStyle(box).backgroundImage.split('gradient').length - 1];
            }"""
        )
        assert width > shown and shades == 4


def test_charts_are_drawn_zoomed_reset_read_by_key_and_follow_the_theme(dashboard: str, chromium: Any) -> None:
    with opened(chromium, dashboard + PAGES["run"]) as (page, said):
        expect(page.locator("figure canvas").nth(7)).to_be_visible()
        assert painted(page, "figure canvas") > 3
        page.locator(".plot").first.focus()
        page.keyboard.press("End")
        expect(page.locator("#spoken")).to_contain_text("step 3: mean 0.")
        before = page.evaluate("() => document.querySelector('canvas').toDataURL()")
        box = page.locator(".plot .u-over").first.bounding_box()
        page.mouse.move(box["x"] + 10, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
        page.mouse.up()
        page.wait_for_function("(before) => document.querySelector('canvas').toDataURL() !== before", arg=before)
        page.locator("#reset").click()
        page.locator("#smooth").fill("0.6")
        expect(page.locator("#smooth-out")).to_have_text("0.60")
        page.locator("#theme").select_option("dark")
        expect(page.locator("body")).to_have_css("background-color", "rgb(17, 21, 27)")
        page.reload()
        settle(page)
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert said == []


def test_keys_list_keys_and_walk_rows(dashboard: str, chromium: Any) -> None:
    with opened(chromium, dashboard + PAGES["run"]) as (page, said):
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#keys")).to_be_hidden()
        page.keyboard.press("j")
        expect(page.locator("#steps tbody tr").first.locator("a").first).to_be_focused()
        page.keyboard.press("j")
        expect(page.locator("#steps tbody tr").nth(1).locator("a").first).to_be_focused()
        page.keyboard.press("k")
        expect(page.locator("#steps tbody tr").first.locator("a").first).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#groups-h")).to_be_visible()
        settle(page)
        page.keyboard.press("g")
        page.keyboard.press("r")
        expect(page).to_have_url(dashboard + "/")
        assert said == []


def test_brackets_walk_steps_and_u_goes_up(dashboard: str, chromium: Any) -> None:
    with opened(chromium, dashboard + PAGES["step"]) as (page, said):
        page.keyboard.press("]")
        expect(page.locator("h1")).to_have_text("Step 2")
        settle(page)
        page.keyboard.press("[")
        expect(page.locator("h1")).to_have_text("Step 1")
        settle(page)
        page.keyboard.press("u")
        expect(page).to_have_url(dashboard + PAGES["run"])
        assert said == []


def test_markup_in_names_and_errors_stays_text(planted: Path, chromium: Any) -> None:
    with viewing(planted) as url:
        for path in ("/", "/?at=2"):
            with opened(chromium, url + path) as (page, said):
                assert page.title() != "planted" and said == []
                assert page.locator("main script:not([type])").count() == 0
        with opened(chromium, url) as (page, said):
            page.get_by_role("link", name="planted").first.click()
            expect(page.locator("#charts figure").first).to_be_visible()
            page.goto(page.url + "/steps/1")
            settle(page)
            expect(page.locator(".chips").first).to_contain_text("<b>ToolError</b>")
            assert page.title() != "planted" and said == []
