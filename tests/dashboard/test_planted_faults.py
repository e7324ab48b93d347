"""Two planted faults are found by looking, with the clicks that docs/dashboard.md tells of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browsing import expect, opened
from tests.dashboard.faulty_runs import BROKEN_TOOL, FLAT_REWARD, FLAT_STEPS, record_faults
from tests.dashboard.viewing import viewing

pytestmark = pytest.mark.slow("a browser")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The dashboard of both runs, and the scenario whose tool fails."""
    folder: Path = tmp_path_factory.mktemp("faulty")
    scenario = record_faults(folder)
    with viewing(folder / "server") as url:
        yield url, scenario


def test_a_tool_that_fails_in_one_group_is_seen_on_the_steps_page(faulty: tuple[str, str], chromium: Any) -> None:
    url, scenario = faulty
    with opened(chromium, url) as (page, said):
        page.get_by_role("link", name=BROKEN_TOOL).click()
        page.locator("#steps tbody a, #eval-h ~ div tbody a").first.click()
        expect(page.locator("h1")).to_have_text("Step 0")
        groups = page.locator("table.groups tbody tr")
        failed = groups.filter(has=page.locator(".chips .failed"))
        expect(failed).to_have_count(1)
        expect(groups).to_have_count(4)
        expect(failed).to_contain_text(scenario)
        expect(failed.locator(".chips .failed").first).to_contain_text("✕ ToolError")
        failed.get_by_role("link", name=scenario).click()
        expect(page.locator("h1")).to_have_text(scenario)
        expect(page.locator(".side .error").first).to_contain_text("is locked")
        assert said == []


def test_a_reward_without_spread_is_warned_of_and_seen_in_equal_chips(faulty: tuple[str, str], chromium: Any) -> None:
    url, _ = faulty
    with opened(chromium, url) as (page, said):
        page.get_by_role("link", name=FLAT_REWARD).click()
        warnings = page.locator("#warnings")
        expect(warnings).to_contain_text("nothing was learned")
        expect(warnings).to_contain_text("almost all groups had equal rewards")
        line = page.locator("#steps tbody tr").first
        expect(line).to_contain_text("nothing learned")
        line.get_by_role("link").click()
        groups = page.locator("table.groups tbody tr")
        expect(groups).to_have_count(4 * FLAT_STEPS)
        expect(groups.get_by_text("equal rewards")).to_have_count(4 * FLAT_STEPS)
        chips = {text.split(": ")[-1] for text in page.locator("table.groups .chips a").all_inner_texts()}
        assert {chip.strip()[-4:] for chip in chips} == {"0.00"}
        groups.first.locator("th a").click()
        expect(page.locator(".why")).to_contain_text("there is nothing to compare")
        assert said == []
