"""Write `notebooks/*.ipynb`, from their `ten_minutes.md` and the examples' own files: `python notebooks.py`, in the folder
`examples`. With `REPOSITORY_URL`, they install Offbook from there and have a badge that opens them in Colab; without it, they
install the checkout that they lie in."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from gpu_forms import FORMS, MIDDLE, SMALL
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

HERE = Path(__file__).parent
BOOKS = HERE / "notebooks"
SHARED = ("measured_training.py", "textarena_env.py")
GAMES = ("guess_number", "tic_tac_toe", "game_2048", "codenames", "temporal_clue")
AGENTS = ("langgraph_email_agent", "mcp_rl", "auto_rl")
BY_A_JUDGE = {
    "langgraph_email_agent": "Without a reward, another LLM compares the rollouts of each question (RULER). Here it is a script; "
    "`--judge openai/gpt-5-mini` asks a real one, with a key in `OPENAI_API_KEY`."
}
"""Example -> what stands above its training by a judge."""
METADATA = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")
COLAB = "https://colab.research.google.com"
INSTALL = """import importlib.util
import shutil
import sys
from pathlib import Path

if importlib.util.find_spec("offbook") is None:
    extras = "{extras}" + ",gpu" * (shutil.which("nvidia-smi") is not None)
    get_ipython().run_line_magic("pip", f"install -q {source}{others}")
Path("{folder}").mkdir(exist_ok=True)"""
T4 = """## On a GPU

A real model, on a free T4 with its weights in 4 bits. Nobody has run this yet; on an H100, [about {hours:.1f} hours](../../docs/examples.md#on-a-gpu) were computed.

```
{command} --load-in-4bit
```"""
CURVE = """import json

import matplotlib.pyplot as plt

for path in sorted(Path("{folder}/results").glob("*.json")):
    figures = json.loads(path.read_text())
    if "rewards" not in figures:
        continue  # of another script
    plt.plot(figures["rewards"], label=path.stem)
    print(f"{{path.stem}}: {{figures['before']:.2f}} to {{figures['after']:.2f}} on what is held out")
plt.xlabel("iteration")
plt.ylabel("mean reward")
plt.legend()
plt.show()"""


def ten_minutes() -> NotebookNode:
    """The notebook that needs no file of the checkout."""
    text = (BOOKS / "ten_minutes.md").read_text().replace("{source}", source())
    return _notebook("ten_minutes", jupytext.reads(text, "md").cells)


def source() -> str:
    """What pip installs, with `{extras}` for a cell to fill in."""
    return f"'offbook[{{extras}}] @ git+{REPOSITORY}'" if REPOSITORY else "'../..[{extras}]'"


def example(folder: str) -> NotebookNode:
    """An example as a notebook: the beginning of its README, its files as cells that write them, and its training."""
    readme = (HERE / folder / "README.md").read_text()
    title, intro, *_ = readme.split("\n\n")
    [packages] = re.findall(r"^pip install (.*?)  # in a checkout$", readme, re.MULTILINE)
    [(extras, others)] = re.findall(r'^"\.\[(.*?)\]"(.*)$', packages)
    own = sorted(path.relative_to(HERE) for path in (HERE / folder).glob("*.py"))
    shared = [name for name in SHARED if any(f"from {name[:-3]} " in (HERE / each).read_text() for each in own)]
    files = [f"%%writefile {name}\n{(HERE / name).read_text().rstrip()}" for name in [*own, *shared]]
    curve = base64.b64encode((HERE / folder / "curve.png").read_bytes()).decode()
    picture = new_output("display_data", data={"image/png": curve})
    train = f"!{{sys.executable}} -m {folder}.train --write"
    judged = [new_markdown_cell(f"## By a judge\n\n{BY_A_JUDGE[folder]}")] if folder in BY_A_JUDGE else []
    judged += [new_code_cell(f"{train} --judge scripted")] * len(judged)
    return _notebook(
        folder,
        [
            new_markdown_cell(f"{title}\n\n{intro}"),
            new_code_cell(
                INSTALL.format(folder=folder, extras=f"{extras},plot", source=source(), others=others.replace('"', "'"))
            ),
            new_markdown_cell("## The files"),
            *map(new_code_cell, files),
            new_markdown_cell(
                "## Train\n\n`--help` in place of `--write` names the options, such as `--base-model` and `--steps`."
            ),
            new_code_cell(train),
            *judged,
            *(
                new_markdown_cell(T4.format(hours=form.hours(), command=form.command))
                for form in FORMS
                if form.example == folder and form.base in (SMALL, MIDDLE)
            ),
            new_markdown_cell(
                "## What it learned\n\nThe picture is of the seeds in the README. The cell draws that of your own run."
            ),
            new_code_cell(CURVE.format(folder=folder), outputs=[picture]),
            new_markdown_cell(f"What a policy does not learn here stands in [its README](../{folder}/README.md)."),
        ],
    )


def _notebook(name: str, cells: Sequence[NotebookNode]) -> NotebookNode:
    """The cells, numbered, so that the same source makes the same file."""
    if REPOSITORY:
        place = f"{COLAB}/{REPOSITORY.removeprefix('https://')}/blob/main/examples/notebooks/{name}.ipynb"
        badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({place.replace('github.com', 'github')})"
        cells[0].source = f"{badge}\n\n{cells[0].source}"
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return new_notebook(cells=list(cells), metadata=METADATA)


def notebooks() -> dict[str, str]:
    """The text of each notebook, by the name of its file."""
    books = {"ten_minutes": ten_minutes(), **{folder: example(folder) for folder in (*GAMES, *AGENTS)}}
    return {f"{name}.ipynb": nbformat.writes(book) + "\n" for name, book in books.items()}


if __name__ == "__main__":
    for name, text in notebooks().items():
        (BOOKS / name).write_text(text)
        print(BOOKS / name)
