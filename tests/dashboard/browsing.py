"""Looking at a page as Chromium shows it: what it said on its console, whether it fits, what axe finds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
LOOKS = (("light", "desktop"), ("dark", "phone"))
"""Schemes and sizes in which a page is looked at: each once, since neither changes what the other lays out."""
AXE_RUN = "() => axe.run({resultTypes: ['violations']}).then((found) => found.violations)"

PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Chromium drops keys that come before the first frame."""

DEADLINE = 60_000
"""Milliseconds until a page must show what a test expects: the machine may be busy."""


def expect(seen: Any) -> Any:
    """Playwright's assertions, which wait until they hold."""
    made = importlib.import_module("playwright.sync_api").expect
    made.set_options(timeout=DEADLINE)
    return made(seen)


def settle(page: Any) -> None:
    """Wait until the page's scripts have run and it is painted: from then on it takes keys."""
    page.wait_for_load_state("networkidle")
    page.evaluate(PAINTED)


@contextmanager
def opened(chromium: Any, url: str, *, scheme: str = "light", size: str = "desktop") -> Iterator[tuple[Any, list[str]]]:
    """A page that has loaded, and everything that its console says, errors and broken policies included."""
    width, height = SIZES[size]
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    try:
        page.goto(url)
        settle(page)
        yield page, said
    finally:
        context.close()


def faults(page: Any, axe: str) -> list[str]:
    """What axe finds, as `rule: element`."""
    page.evaluate(axe)
    return [
        f"{violation['impact']} {violation['id']}: {node['html'][:160]}"
        for violation in page.evaluate(AXE_RUN)
        for node in violation["nodes"]
    ]


def overflow(page: Any) -> int:
    """How many pixels the page is wider than its window."""
    return page.evaluate("() => Math.max(0, document.documentElement.scrollWidth - innerWidth)")


def painted(page: Any, selector: str) -> int:
    """How many different colours a canvas has."""
    return page.evaluate(
        """(selector) => {
          const canvas = document.querySelector(selector);
          if (!canvas || !canvas.width || !canvas.height) return 0;
          const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let at = 0; at < data.length; at += 4) seen.add(data[at] << 24 | data[at+1] << 16 | data[at+2] << 8 | data[at+3]);
          return seen.size;
        }""",
        selector,
    )
