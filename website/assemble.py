"""Write the site's pages into a folder: docs/, the pages outside it, and the references of the command line and of Python.

    python website/assemble.py OUTPUT

docs/ stays readable on GitHub: a link to a file that is no page of the site becomes one to the repository (`REPOSITORY_URL`), of a
notebook one that opens it in Colab, and both are plain text while that is not set.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from typer.main import get_command

import offbook
from offbook.commands import main as commands

ROOT = Path(__file__).parent.parent
LINK_OR_CODE = re.compile(
    r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)|^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL
)
HERE = "website/pages"
COLAB = "https://colab.research.google.com/github"
EXPORTED = {
    "offbook_langgraph": ("trainable", "observe", "capture"),
    "offbook": tuple(offbook.__all__),
    "offbook_compare": ("acompare", "ComparisonReport"),
    "offbook_auto": ("AutoTrainer",),
}
"""Module -> its names in the Python reference."""


def site_pages() -> dict[str, str]:
    """Page in the repository -> its place in the site."""
    pages = {f"{HERE}/{page.name}": page.name for page in (ROOT / HERE).glob("*.md")}
    pages |= {f"docs/{page.name}": page.name for page in (ROOT / "docs").glob("*.md")}
    results = (ROOT / "benchmarks/results").glob("*.md")
    pages |= {f"benchmarks/results/{page.name}": f"results/{page.name}" for page in results}
    examples = (ROOT / "examples").glob("*/README.md")
    pages |= {f"examples/{page.parent.name}/README.md": f"examples/{page.parent.name}.md" for page in examples}
    pages |= {f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
    return pages | {"policies/README.md": "policies.md"}


def pictures() -> dict[str, str]:
    """Picture of a page outside docs/ -> its place in the site."""
    names = [str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/*.png")]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/*.png")]
    return {name: f"images/{name.replace('/', '-')}" for name in names}


def rewritten(text: str, page: str, pages: dict[str, str], repository: str | None) -> str:
    """A page's text with the links of the site. Raises SystemExit for a link to a file that does not exist."""

    def link(match: re.Match[str]) -> str:
        if not match[3]:  # code
            return match[0]
        mark, words, name, anchor = match[1], match[2], match[3], match[4] or ""
        target = normpath(str(PurePosixPath(page).parent / name))
        if f"{target}/README.md" in pages:
            target += "/README.md"
        if target in pages or target.startswith("docs/images/"):
            place = pages.get(target) or target.removeprefix("docs/")
            return f"{mark}[{words}]({relpath(place, PurePosixPath(pages[page]).parent)}{anchor})"
        if not (ROOT / target).exists():
            raise SystemExit(f"{page} links to {name}, which does not exist: correct the link")
        if repository and target.endswith(".ipynb"):
            return f"[{words}]({repository.replace('https://github.com', COLAB)}/blob/main/{target})"
        return f"[{words}]({repository}/blob/main/{target}{anchor})" if repository else words

    return LINK_OR_CODE.sub(link, text)


def usage(command: Any, path: str) -> Iterator[str]:
    """A command's section: what it does, its arguments and options, and its subcommands."""
    context = command.context_class(command, info_name=path)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None:
                yield from usage(inner, f"{path} {name}")
        return
    arguments = " ".join(part for part in command.collect_usage_pieces(context))
    text, _, examples = (command.help or "").partition("\b\n")  # click's mark of lines that are not wrapped
    yield f"## {path}\n\n{text.strip()}\n\n```\n{path} {arguments}\n```\n"
    if examples:
        title, *lines = examples.strip().splitlines()
        yield "\n".join([f"{title}\n", "```", *(line.strip() for line in lines), "```\n"])
    rows = [record for parameter in command.params if (record := parameter.get_help_record(context)) is not None]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{name.replace('|', '&#124;')}` | {cell(text)} |" for name, text in rows)
        yield ""


def cell(text: str) -> str:
    """A text as a cell of a table, letters that are markup escaped."""
    return re.sub(r"([|<*_\[])", r"\\\1", " ".join(text.split()))


def command_page() -> str:
    """The reference of the command line, from the commands themselves."""
    commands.add_plugged_commands()
    names = [command.name for command in commands.app.registered_commands if command.name]
    sections = [line for name in names for line in usage(get_command(commands.loaded(name)), f"offbook {name}")]
    opening = (
        "# Command line\n\nEvery command and option, as `offbook COMMAND --help` shows them. `offbook --version` shows the version.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.\n"
    )
    return "\n".join([opening, *sections])


def python_page() -> str:
    """The Python reference: names for mkdocstrings, which reads their docstrings."""
    lines = ["# Python", ""]
    for module, names in EXPORTED.items():
        lines += [f"## {module}", ""]
        lines += [f"::: {module}.{name}\n    options:\n      heading_level: 3\n" for name in names]
    return "\n".join(lines)


def llms_page(pages: dict[str, str], texts: dict[str, str]) -> str:
    """`llms.txt`: each page of docs/ with its first paragraph (llmstxt.org)."""
    lines = ["# Offbook", "", f"> {(offbook.__doc__ or '').strip()}", "", "## Pages", ""]
    for page, place in sorted(pages.items()):
        if page.startswith("docs/"):
            title, first = texts[place].split("\n\n")[:2]
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
            lines.append(f"- [{title.removeprefix('# ')}]({place.removesuffix('.md')}/): {words}")
    return "\n".join(lines) + "\n"


def write_pages(output: Path) -> None:
    """Write the pages that people write, their images and `llms.txt` into `output`, which is emptied first."""
    shutil.rmtree(output, ignore_errors=True)
    pages, images, repository = site_pages(), pictures(), os.environ.get("REPOSITORY_URL")
    texts = {
        place: rewritten((ROOT / page).read_text("utf-8"), page, pages | images, repository)
        for page, place in pages.items()
    }
    texts["llms.txt"] = llms_page(pages, texts)
    for place, text in texts.items():
        (output / place).parent.mkdir(parents=True, exist_ok=True)
        (output / place).write_text(text, "utf-8")
    shutil.copytree(ROOT / "docs/images", output / "images")
    for picture, place in images.items():
        shutil.copy(ROOT / picture, output / place)
    for name in ("site.css", "labels.js"):
        shutil.copy(ROOT / HERE / name, output / name)


def main(output: Path) -> None:
    """Write all pages, the two references included."""
    write_pages(output)
    (output / "command_line.md").write_text(command_page(), "utf-8")
    (output / "python.md").write_text(python_page(), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
