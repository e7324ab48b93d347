"""Every page of docs/ opens with its reader and what the page gives, and is short: as a page and in its sentences."""

from __future__ import annotations

import re
from statistics import mean

import pytest

from tests.paths import ROOT

WORD_LIMIT = 1500
LONGEST_SENTENCE = 35
UNLIMITED = {"architecture.md"}
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def prose(page: str) -> str:
    """A page without its code blocks and tables."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in without_code.splitlines() if not line.startswith("|"))


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose, without headings. Code in a sentence is one word; a list item is a paragraph."""
    text = "\n".join(line for line in prose(page).splitlines() if not line.startswith(("#", "!", "<")))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", text))
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    found = (sentence for paragraph in paragraphs for sentence in re.split(r'(?<=[.!?:])\s+(?=[A-Z0-9*"(])', paragraph))
    return [sentence for sentence in found if words(sentence) > 1]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'.-]+", sentence))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in UNLIMITED])
def test_a_page_has_at_most_1500_words_outside_tables_and_code(page: str) -> None:
    count = len(prose(page).split())
    assert count <= WORD_LIMIT, f"docs/{page} has {count} words, at most {WORD_LIMIT}: shorten or split it"


def test_sentences_are_short() -> None:
    lengths = {page: [words(sentence) for sentence in sentences(page)] for page in ("../README.md", *PAGES)}
    long = [s for page in lengths for s in sentences(page) if words(s) > LONGEST_SENTENCE]
    assert not long, f"above {LONGEST_SENTENCE} words: {long}"
    every = [length for of_page in lengths.values() for length in of_page]
    assert len(every) > 1000 and mean(every) < 14, (
        f"sentences have {mean(every):.1f} words on average, below 14 is the goal"
    )


def test_every_column_of_a_table_has_a_header() -> None:
    folders = ("docs", "benchmarks", "examples", "website/pages")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    pages = [page for page in pages if "node_modules" not in page.parts]
    nameless = [
        f"{page.relative_to(ROOT)}: {header}"
        for page in pages
        for header in re.findall(r"^(\|.*)\n\|[ :|-]+\|$", page.read_text("utf-8"), re.MULTILINE)
        if not all(cell.strip() for cell in header[1:].rstrip().removesuffix("|").split("|"))
    ]
    assert len(pages) > 80 and not nameless


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_first_whom_it_is_for_and_what_it_gives(page: str) -> None:
    title, first = prose(page).split("\n\n")[:2]
    assert title.startswith("# "), f"docs/{page} does not begin with a title"
    assert re.search(r"\byour?\b", first), (
        f"docs/{page}: the first paragraph must say what you, the reader, get from it, and reads {first[:80]!r}"
    )
