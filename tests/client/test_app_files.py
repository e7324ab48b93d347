"""Whose file is this: the app's, or that of Python, of a package, or ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

import offbook
import offbook_langgraph
from offbook.client.rollouts.failures import is_app_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path into which `pip install --target` put a package, beside an app and what its build left."""
    (tmp_path / "fetching-1.0.dist-info").mkdir()
    (tmp_path / "fetching-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: fetching\nVersion: 1.0\n")
    (tmp_path / "fetching-1.0.dist-info/RECORD").write_text("fetching/client.py,,\nsingle.py,,\n")
    (tmp_path / "fetching").mkdir()
    for file in ("fetching/client.py", "single.py"):
        (tmp_path / file).touch()
    (tmp_path / "app.egg-info").mkdir()
    (tmp_path / "app.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: app\nVersion: 1.0\n")
    (tmp_path / "app.egg-info/SOURCES.txt").write_text("app/agent.py\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("app/agent.py", True),
        ("fetching_more.py", True),
        ("fetching/client.py", False),
        ("single.py", False),
        ("lib/python3.12/site-packages/any.py", False),
    ],
)
def test_a_package_is_known_by_its_metadata_wherever_it_lies(folder: Path, file: str, own: bool) -> None:
    assert is_app_file(str(folder / file)) is own


@pytest.mark.parametrize(
    "file", [json.__file__, httpx.__file__, "<string>", offbook.__file__, offbook_langgraph.__file__]
)
def test_python_packages_and_this_package_are_not_the_apps(file: str) -> None:
    assert not is_app_file(file)
    assert is_app_file(__file__) and is_app_file(str(Path(sys.prefix).parent / "app.py"))
