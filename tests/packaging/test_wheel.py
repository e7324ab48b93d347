"""The wheel works where the checkout is not: its weights, its commands, its server."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from offbook.tiny import FOLDERS
from tests.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (built,) = folder.glob("offbook-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the wheel; what it needs comes from this one's site-packages."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (here,) = Path(sys.prefix).glob("lib/python*/site-packages")
    # Appended without running its .pth files, so that the editable checkout is not found.
    (site / "zz_rest.pth").write_text(f"{here}\n")
    return python


def run(python: Path, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def test_the_wheel_holds_the_weights_and_stays_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    assert "offbook/py.typed" in sizes
    assert [name for name in sizes if name.startswith("policies/")] == []
    for package in ("offbook_langgraph", "offbook_mcp"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(sizes)
    kit = {f"offbook/testing/{path.name}" for path in (ROOT / "src/offbook/testing").glob("*.py")}
    assert len(kit) > 5 and kit <= set(sizes)
    for folder in FOLDERS.values():
        policy = {name: size for name, size in sizes.items() if name.startswith(f"offbook/tiny/{folder}/")}
        names = {name.rsplit("/", 1)[1] for name in policy}
        assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
        assert sum(policy.values()) < 10e6


@pytest.mark.slow("an installed wheel")
def test_the_installed_package_is_the_wheel_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    answer = run(installed, "-c", "import offbook, offbook.tiny as t; print(offbook.__file__, t.path())", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for place in answer.stdout.split():
        assert str(installed.parents[1]) in place


KIT = """
from openai import OpenAI
from offbook.testing import Action, check_sink, scripted_server
with scripted_server(lambda request: Action("on shelf 7")) as server:
    client = OpenAI(base_url=f"{server.url}/t/one/v1", api_key="unused")
    client.chat.completions.create(model="default", messages=[{"role": "user", "content": "where?"}])
    print([output.message["content"] for call in server.calls("one") for output in call.outputs])
"""


@pytest.mark.slow("an installed wheel")
def test_the_test_kit_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    answer = run(installed, "-c", KIT, cwd=tmp_path)
    assert answer.stdout == "['on shelf 7']\n", answer.stderr


@pytest.mark.slow("an installed wheel")
def test_the_server_explains_itself(installed: Path, tmp_path: Path) -> None:
    answer = run(installed, "-m", "offbook.server", "--help", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "--model" in answer.stdout and "--port" in answer.stdout


@pytest.mark.slow("whole trainings")
def test_the_quickstart_makes_one_step_and_a_second_run_goes_on(installed: Path, tmp_path: Path) -> None:
    first = quickstart(installed, tmp_path)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["seed"] == 3
    assert set(results["success"]) == set(results["sampled"]) == {"before", "after"}
    assert 0 <= results["success"]["before"] <= 1
    assert len(results["rewards"]) == len(results["seconds"]["rollout"]) == len(results["seconds"]["train"]) == 1
    assert (tmp_path / "desk" / "rewards.png").read_bytes().startswith(b"\x89PNG")
    [lora] = [line.split(maxsplit=1)[1] for line in first.stdout.splitlines() if line.startswith("LoRA")]
    assert (Path(lora) / "adapter_model.safetensors").exists()
    assert "offbook export order-desk-3" in first.stdout

    again = quickstart(installed, tmp_path)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to train" in again.stdout
    assert json.loads((tmp_path / "results.json").read_text())["success"]["before"] == results["success"]["before"]


def quickstart(installed: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["--steps", "1", "--seed", "3", "--results", "results.json", "--output", "desk"]
    command = [str(installed.parent / "offbook"), "quickstart", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
