"""`scripts/bootstrap` on machines that lack something: one sentence with the fix, and no half-made environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, and a `bin` that holds the few commands that it may find."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src/offbook").mkdir(parents=True)
    (tmp_path / "src/offbook/__init__.py").touch()
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cat", "dirname", "rm", "grep"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    return tmp_path


def bootstrap(checkout: Path, set_name: str = "quickstart") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(checkout / "bin")}
    return subprocess.run(
        [checkout / "scripts" / "bootstrap", set_name], env=environment, capture_output=True, text=True, timeout=60
    )


def put(file: Path, lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(0o755)


PIP = """
import pathlib, sys
folder = pathlib.Path(__file__).parents[1]
if sys.argv[1] != "--version":
    with (folder / "asked").open("a") as file:
        print(*sys.argv[1:], file=file)
if "--editable" in sys.argv:
    (folder / "offbook.pth").write_text(f"{pathlib.Path.cwd() / 'src'}\\n")
"""


def environment_with_a_false_pip(checkout: Path) -> Path:
    """Make `.venv`, whose pip only writes down what was asked for, and links the checkout. Returns its packages' folder."""
    put(checkout / "bin" / "python3", f'exec {sys.executable} "$@"')
    venv.create(checkout / ".venv", with_pip=False)
    [packages] = (checkout / ".venv").glob("lib/python*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(PIP)
    return packages


def asked_for(packages: Path) -> list[str]:
    """The installations since the last call."""
    asked = packages / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    asked.unlink(missing_ok=True)
    return [line for line in lines if " install " in f" {line} "]


def test_without_a_recent_python_it_says_what_to_install(checkout: Path) -> None:
    put(checkout / "bin" / "python3", "exit 1")  # it is there, and does not run
    done = bootstrap(checkout)
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr
    assert "apt install python3.11" in done.stderr


def test_without_venv_it_names_the_package_of_this_very_python(checkout: Path) -> None:
    put(checkout / "bin" / "python3", f'case "$2" in *"import venv"*) exit 1;; esac\nexec {sys.executable} "$@"')
    done = bootstrap(checkout)
    assert done.returncode == 2
    assert f"python3.{sys.version_info.minor}-venv" in done.stderr


def test_an_environment_whose_python_is_gone_is_made_again_in_spite_of_its_stamp(checkout: Path) -> None:
    environment_with_a_false_pip(checkout)
    put(checkout / "bin" / "python3", f'case "$2" in venv) echo made >&2; exit 7;; esac\nexec {sys.executable} "$@"')
    assert bootstrap(checkout).returncode == 0
    assert bootstrap(checkout).stdout == ""
    (checkout / ".venv" / "bin" / "python").unlink()
    done = bootstrap(checkout)
    assert done.returncode == 7
    assert "made" in done.stderr


def test_a_copy_that_replaced_the_checkout_in_the_environment_is_replaced_again(checkout: Path) -> None:
    packages = environment_with_a_false_pip(checkout)
    assert bootstrap(checkout).returncode == 0 and len(asked_for(packages)) == 2
    assert bootstrap(checkout).stdout == "" and asked_for(packages) == []
    (packages / "offbook.pth").unlink()  # what `pip install ".[mcp,server]"` does
    (packages / "offbook").mkdir()
    (packages / "offbook" / "__init__.py").touch()
    done = bootstrap(checkout)
    assert done.returncode == 0 and "is not this checkout" in done.stdout
    [only] = asked_for(packages)
    assert "--editable" in only and "--no-deps" in only


def test_the_engines_follow_what_they_need_without_their_own_requirements_and_a_new_pin_installs_them_again(
    checkout: Path,
) -> None:
    packages = environment_with_a_false_pip(checkout)
    assert bootstrap(checkout, "test").returncode == 0
    first, second, third = asked_for(packages)
    assert "requirements/test.txt" in first and "--no-deps" not in first
    assert "--no-deps" in second and "requirements/engines-nodeps.txt" in second
    assert "--editable" in third
    assert bootstrap(checkout, "test").stdout == "" and asked_for(packages) == []
    with (checkout / "requirements" / "engines.txt").open("a") as file:
        file.write("wheel==0.48.0\n")
    assert bootstrap(checkout, "test").returncode == 0
    assert "requirements/engines-nodeps.txt" in " ".join(asked_for(packages))


def test_every_line_of_every_set_is_pinned() -> None:
    loose: list[str] = []
    for file in (ROOT / "requirements").glob("*.txt"):
        lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
        loose += [f"{file.name}: {line}" for line in lines if line and not line.startswith("-r ") and "==" not in line]
    assert loose == []
