"""Every page of docs/ opens with its audience and purpose, and is short enough to read in one sitting."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

WORD_LIMIT = 900
UNLIMITED = {"architecture.md"}
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def prose(page: str) -> str:
    """A page without its code blocks and tables."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in without_code.splitlines() if not line.startswith("|"))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in UNLIMITED])
def test_a_page_has_at_most_900_words_outside_tables_and_code(page: str) -> None:
    words = len(prose(page).split())
    assert words <= WORD_LIMIT, f"docs/{page} has {words} words, at most {WORD_LIMIT}: shorten or split it"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_first_whom_it_is_for_and_what_it_gives(page: str) -> None:
    title, first = prose(page).split("\n\n")[:2]
    assert title.startswith("# "), f"docs/{page} does not begin with a title"
    assert re.match(r"For [^:]+: \S", first), (
        f"docs/{page}: the first paragraph must read 'For READER: WHAT THE PAGE GIVES', and reads {first[:80]!r}"
    )
