"""The site: every page has its place, links and images lead somewhere, nothing is loaded from elsewhere, and a browser shows it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from offbook.commands.main import OWN
from tests.dashboard.browsing import LOOKS, faults, opened, overflow
from tests.paths import ROOT, script

SITE = ROOT / "website"
CONFIGURATION = (SITE / "mkdocs.yml").read_text("utf-8")
DIAGRAMS = ("exact", "loop", "machines", "processes", "token-tree")
MAIN = (
    "",
    "quickstart/",
    "pictures/",
    "langgraph/",
    "mcp_training/",
    "how_much/",
    "examples/",
    "learner/",
    "command_line/",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The assembled pages, without the references, which import every command."""
    folder = tmp_path_factory.mktemp("site") / "pages"
    script(SITE / "assemble.py").write_pages(folder)
    return folder


def test_every_page_is_in_the_navigation_once(pages: Path) -> None:
    named = re.findall(r"([\w/]+\.md)$", CONFIGURATION, re.MULTILINE)
    written = [str(page.relative_to(pages)) for page in pages.rglob("*.md")]
    assert sorted(named) == sorted([*written, "command_line.md", "python.md"])


def test_links_and_images_lead_to_files_of_the_site(pages: Path) -> None:
    broken: list[str] = []
    images = 0
    for page in pages.rglob("*.md"):
        blocks = MarkdownIt().enable("table").parse(page.read_text("utf-8"))
        parts = [part for block in blocks for part in block.children or []]
        targets = [str(part.attrs[name]) for part in parts for name in ("href", "src") if name in part.attrs]
        here = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
        broken += [f"{page.name}: {target}" for target in here if not (page.parent / target).is_file()]
        images += sum(target.endswith((".png", ".svg")) for target in here)
        loaded = [part for part in parts if part.type == "image" and str(part.attrs["src"]).startswith("http")]
        own = [part for part in [*parts, *blocks] if part.type in ("html_block", "html_inline")]
        loaded += [part for part in own if re.search(r"<(img|script|iframe)\b", part.content)]
        assert loaded == [], f"{page.name} loads from elsewhere"
    assert broken == []
    assert images >= len(DIAGRAMS)


def test_llms_txt_names_each_page_with_its_first_words(pages: Path) -> None:
    assert "- [Quickstart](quickstart/): This page is for you if you are new to Offbook." in (
        pages / "llms.txt"
    ).read_text("utf-8")


@pytest.mark.slow("the site")
def test_the_references_have_every_command_and_every_name(tmp_path: Path) -> None:
    script(SITE / "assemble.py").main(tmp_path)
    text = (tmp_path / "command_line.md").read_text("utf-8")
    headings = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    assert {f"offbook {name}" for name in OWN if name != "traces"} <= headings
    assert {"offbook mcp train", "offbook traces export", "offbook takeover start"} <= headings
    assert "| `--group-size <" in text and "`--set NAME=VALUE`" in text
    assert "::: offbook.TrainableModel\n" in (tmp_path / "python.md").read_text("utf-8")


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_readable_in_light_and_dark_has_words_and_loads_nothing(name: str) -> None:
    text = (ROOT / "docs/images" / f"{name}.svg").read_text("utf-8")
    root = ElementTree.fromstring(text)
    for tag in ("title", "desc"):
        assert (root.findtext(f"{{http://www.w3.org/2000/svg}}{tag}") or "").strip()
    assert "prefers-color-scheme:dark" in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text


@pytest.fixture(scope="module")
def built(require: Callable[[bool, str], None]) -> Path:
    """The site, built strictly."""
    require((SITE / ".venv/bin/zensical").exists(), "make site")
    done = subprocess.run([SITE / "build"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return SITE / "built"


@pytest.mark.slow("the site")
def test_the_site_loads_nothing_from_elsewhere(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > 60
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(https?:[^\"\s>]+)")
    for page in pages:
        text = page.read_text("utf-8")
        assert loaded.findall(text) == [], page
        for target in re.findall(r"(?:src|href)=\"?([^\"\s>#?:]+)[\"\s>#?]", text):
            place = (built / target[1:]) if target.startswith("/") else page.parent / target
            assert place.exists(), f"{page} has {target}, which does not exist"


@pytest.fixture(scope="module")
def site(built: Path) -> Iterator[str]:
    """The address of the built site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.slow("a browser")
@pytest.mark.parametrize(("scheme", "size"), LOOKS)
@pytest.mark.parametrize("name", MAIN)
def test_a_main_page_is_accessible_and_fits(
    site: str, chromium: Any, axe: str, name: str, scheme: str, size: str
) -> None:
    with opened(chromium, site + name, scheme=scheme, size=size) as (page, said):
        assert faults(page, axe) == []
        assert overflow(page) == 0
        assert said == []


@pytest.mark.slow("a browser")
def test_a_diagram_can_be_read_on_a_phone(site: str, chromium: Any) -> None:
    with opened(chromium, site + "pictures/", size="phone") as (page, _):
        widths = page.evaluate("() => [...document.querySelectorAll('article img')].map((image) => image.clientWidth)")
    assert widths == [600] * 5
