"""Write `notebooks/*.ipynb`, from their `ten_minutes.md` and the examples' own files: `python notebooks.py`, in the folder
`examples`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
BOOKS = HERE / "notebooks"
SHARED = ("textarena_env.py", "measured_training.py")
GAMES = ("guess_number", "tic_tac_toe", "game_2048", "codenames", "temporal_clue")
METADATA = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

INSTALL = """import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("offbook") is None:
    get_ipython().run_line_magic("pip", "install -q 'offbook[quickstart]' 'textarena>=0.7.4,<0.8'")
Path("{folder}").mkdir(exist_ok=True)"""
CURVE = """import json

import matplotlib.pyplot as plt

for path in sorted(Path("{folder}/results").glob("*.json")):
    figures = json.loads(path.read_text())
    plt.plot(figures["rewards"])
    print(f"seed {{figures['seed']}}: {{figures['before']:.2f}} to {{figures['after']:.2f}} on held-out matches")
plt.xlabel("iteration")
plt.ylabel("mean reward")
plt.show()"""


def ten_minutes() -> NotebookNode:
    """The notebook that needs no file of the checkout."""
    return _notebook(jupytext.read(BOOKS / "ten_minutes.md").cells)


def game(folder: str) -> NotebookNode:
    """An example as a notebook: the beginning of its README, its files as cells that write them, and its training."""
    title, intro, *_ = (HERE / folder / "README.md").read_text().split("\n\n")
    own = sorted(path.relative_to(HERE) for path in (HERE / folder).glob("*.py"))
    files = [f"%%writefile {name}\n{(HERE / name).read_text().rstrip()}" for name in [*SHARED, *own]]
    return _notebook(
        [
            new_markdown_cell(f"{title}\n\n{intro}"),
            new_code_cell(INSTALL.format(folder=folder)),
            new_markdown_cell("## The files"),
            *map(new_code_cell, files),
            new_markdown_cell("## Train\n\n`--steps`, `--seed`, `--dir`, `--base-model`, `--rate`."),
            new_code_cell(f"!{{sys.executable}} -m {folder}.train --write"),
            new_markdown_cell("## What it learned"),
            new_code_cell(CURVE.format(folder=folder)),
            new_markdown_cell(f"What a policy does not learn here stands in [its README](../{folder}/README.md)."),
        ]
    )


def _notebook(cells: Sequence[NotebookNode]) -> NotebookNode:
    """The cells, numbered, so that the same source makes the same file."""
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return new_notebook(cells=list(cells), metadata=METADATA)


def notebooks() -> dict[str, str]:
    """The text of each notebook, by the name of its file."""
    books = {"ten_minutes": ten_minutes(), **{folder: game(folder) for folder in GAMES}}
    return {f"{name}.ipynb": nbformat.writes(book) + "\n" for name, book in books.items()}


if __name__ == "__main__":
    for name, text in notebooks().items():
        (BOOKS / name).write_text(text)
        print(BOOKS / name)
