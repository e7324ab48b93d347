"""The notebooks of examples/notebooks: they are what `python notebooks.py` writes, and each trains when it is run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import offbook
from tests.examples.trainings import EXAMPLES, api_of, trained_in

TRAINED = {
    "ten_minutes": {"desk"},
    "guess_number": {"guess-number-0"},
    "tic_tac_toe": {"tic-tac-toe-random-0"},
    "game_2048": {"game-2048-2-0"},
    "codenames": {"spymaster-code-0", "operative-code-0"},
    "temporal_clue": {"temporal-clue-look-up-0"},
    "langgraph_email_agent": {"email-agent-0", "email-agent-ruler-0"},
    "mcp_rl": {"orders-0"},
    "auto_rl": {"trains-0"},
}
"""Notebook -> the models that it trains."""
SHORTER = {
    " --write": " --steps 1 --held-out 4 --write",
    "steps=20": "steps=1",
    "scenarios_per_step=12": "scenarios_per_step=2",
}
WHOLE = ("ten_minutes", "guess_number")
"""Train on a server of their own, as their reader does; the others on the tests' one."""
OWN_SERVER = "offbook.LocalBackend(options.dir, load_in_4bit=options.load_in_4bit)"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textarena")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_notebooks_are_those_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from notebooks import BOOKS, notebooks

    written = {path.name: path.read_text() for path in BOOKS.glob("*.ipynb")}
    assert set(written) == {f"{name}.ipynb" for name in TRAINED}
    stale = [name for name, text in notebooks().items() if written[name] != text]
    assert not stale, "run `python notebooks.py` in examples/"


def test_with_a_repository_they_install_from_it_and_open_in_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import notebooks

    assert all("'../..[{extras}]'" in text and "colab-badge" not in text for text in notebooks.notebooks().values())
    monkeypatch.setattr(notebooks, "REPOSITORY", "https://github.com/them/offbook")
    for name, text in notebooks.notebooks().items():
        assert "'offbook[{extras}] @ git+https://github.com/them/offbook'" in text
        assert f"https://colab.research.google.com/github/them/offbook/blob/main/examples/notebooks/{name})" in text


@pytest.mark.slow("whole trainings")
@pytest.mark.parametrize("name", TRAINED)
def test_a_notebook_runs(name: str, tmp_path: Path, litellm: Any, local_backend: offbook.LocalBackend) -> None:
    import nbclient
    import nbformat

    book = nbformat.read(EXAMPLES / f"notebooks/{name}.ipynb", as_version=4)
    replaced, folders, before = SHORTER, [tmp_path], set[str]()
    if name not in WHOLE:
        assert any(OWN_SERVER in cell.source for cell in book.cells)
        api = api_of(local_backend)
        replaced = SHORTER | {OWN_SERVER: f"offbook.RemoteBackend({api.url!r}, {api.key!r})"}
        folders, before = [tmp_path, local_backend.dir], trained_in(local_backend.dir)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = []
        for whole, short in replaced.items():
            cell.source = cell.source.replace(whole, short)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own, of its messaging sockets
        done = nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs), f"the curve: {outputs}"
    trained = trained_in(*folders) - before
    assert trained == TRAINED[name], [each.get("text") for each in outputs]
