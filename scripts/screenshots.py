"""Pictures of the dashboard's pages, for docs/images/: desktop in light colours, phone in dark ones.

    python scripts/screenshots.py                       # of a run that it records itself, which takes some minutes
    python scripts/screenshots.py offbook-quickstart/server   # of a server's directory: its newest run

Needs playwright (requirements/test.txt) and Debian's chromium.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urljoin

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.dashboard.browsing import SIZES  # noqa: E402  # found by the line above
from tests.dashboard.recorded_run import record_run  # noqa: E402
from tests.dashboard.viewing import viewing  # noqa: E402

IMAGES = ROOT / "docs" / "images"
STEPS = 12
MOST_HIGH = 1500
"""Pixels: what is below is left out of a picture."""


class Shot(NamedTuple):
    """A page to show. `click`: what is selected first; the picture is then what the window shows, not the whole page."""

    name: str
    address: str
    click: str | None = None


def shots(browser: Browser, url: str) -> list[Shot]:
    """The pages of the newest run: its newest step that taught something, the group that taught most, its best rollout."""
    page = browser.new_page()
    page.goto(url)
    run = urljoin(url, page.locator("table.rows tbody a").first.get_attribute("href"))
    page.goto(run)
    steps = [urljoin(url, link.get_attribute("href")) for link in page.locator("#steps tbody a").all()]
    step = next(step for step in steps if page.goto(step) and page.locator(".groups .badge.done").count())
    group = urljoin(url, page.locator("table.groups tbody th a").first.get_attribute("href"))
    page.goto(group)
    rollout = urljoin(url, page.locator(".side h3 a").first.get_attribute("href"))
    page.goto(rollout)
    surprising = page.locator(".tokens .s3, .tokens .s2, .tokens .s1, .tokens .p1, .tokens .n1")
    token = ".tokens " + (
        "." + surprising.first.evaluate("token => token.classList[1]") if surprising.count() else "span"
    )
    page.close()
    return [
        Shot("runs", url),
        Shot("run", run),
        Shot("step", step),
        Shot("group", group),
        Shot("rollout", rollout, token),
    ]


def shoot(browser: Browser, shot: Shot, scheme: Literal["light", "dark"], size: str) -> None:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(shot.address, wait_until="networkidle")
    page.wait_for_timeout(300)  # the legends of charts follow their drawing
    if shot.click is not None:
        page.locator(shot.click).first.click()
    if shot.click is None or size == "desktop":
        high = min(MOST_HIGH, page.evaluate("() => document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": width, "height": max(height, high)})
    else:  # a sheet lies at the bottom of the window
        page.locator("#transcript-h").evaluate("(heading) => heading.scrollIntoView()")
    page.wait_for_timeout(300)
    page.screenshot(path=IMAGES / f"{shot.name}-{size}-{scheme}.png")
    context.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(scratch) / "server"
        if not sys.argv[1:]:
            record_run(Path(scratch), STEPS)
        with viewing(folder.absolute()) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
            for shot in shots(browser, url):
                shoot(browser, shot, "light", "desktop")
                shoot(browser, shot, "dark", "phone")
            browser.close()


if __name__ == "__main__":
    main()
