"""The wheel works where the checkout is not: its weights, its commands, its server. What a release is made of agrees with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import offbook
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


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_wheel_holds_the_weights_and_stays_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    assert "offbook/py.typed" in sizes
    assert [name for name in sizes if name.startswith("policies/")] == []
    licences = f"offbook-{offbook.__version__}.dist-info/licenses"
    vendored = "integrations/offbook_dashboard/static/vendor"
    texts = ("LICENSE", "THIRD_PARTY_NOTICES.md", f"{vendored}/uPlot.LICENSE")
    assert {f"{licences}/{text}" for text in texts} <= set(sizes)
    assert {name for name in sizes if "/vendor/" in name and "licenses" not in name} == {
        f"offbook_dashboard/static/vendor/{name}" for name in ("uPlot.LICENSE", "uPlot.iife.min.js", "uPlot.min.css")
    }, "THIRD_PARTY_NOTICES.md names what others wrote: change it too"
    for package in ("offbook_langgraph", "offbook_mcp"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(sizes)
    kit = {f"offbook/testing/{path.name}" for path in (ROOT / "src/offbook/testing").glob("*.py")}
    assert len(kit) > 5 and kit <= set(sizes)
    for folder in FOLDERS.values():
        policy = {name: size for name, size in sizes.items() if name.startswith(f"offbook/tiny/{folder}/")}
        names = {name.rsplit("/", 1)[1] for name in policy}
        assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
        assert sum(policy.values()) < 10e6


def test_on_pypi_every_link_and_image_of_the_readme_leads_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    here = ProjectMetadata(str(ROOT), PluginManager()).core
    assert here.readme == (ROOT / "README.md").read_text("utf-8") and here.urls == {}
    place = "https://git.example/team/offbook"
    monkeypatch.setenv("REPOSITORY_URL", place)
    there = ProjectMetadata(str(ROOT), PluginManager()).core
    tag = f"v{offbook.__version__}"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", there.readme)
    assert len(links) > 60
    for image, link in links:
        assert link.startswith(f"{place}/{'raw' if image else 'blob'}/{tag}/"), link
        assert (ROOT / link.split(f"/{tag}/")[1].partition("#")[0]).exists(), link
    assert there.urls["Repository"] == place and there.readme_content_type == "text/markdown"
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    [build] = [step for step in workflow["jobs"]["build"]["steps"] if "python -m build" in step.get("run", "")]
    assert "REPOSITORY_URL" in build["env"]


def test_every_step_of_the_workflows_runs_one_thing_with_bounded_rights_and_time() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert {file.stem for file in workflows} >= {"ci", "docs", "macos", "release"}
    for file in workflows:
        workflow = yaml.safe_load(file.read_text("utf-8"))
        assert isinstance(workflow["permissions"], dict), f"{file.name} has the default rights"
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"] > 0, f"{file.name}: {name}"
            assert job.get("needs", name) in workflow["jobs"], f"{file.name}: {name}"
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), f"{file.name}: {step}"
                assert "@v" in step.get("uses", "@v") or len(step["uses"].partition("@")[2]) == 40, (
                    f"{file.name}: {step}"
                )


def test_the_citation_names_this_version_and_licence_and_all_forms_parse() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["title"], citation["version"]) == ("Offbook", offbook.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert citation["license"] == project["license"].split()[0] and citation["abstract"] == project["description"]
    forms = [ROOT / ".github/dependabot.yml", *(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    assert len(forms) == 4 and all(isinstance(yaml.safe_load(form.read_text("utf-8")), dict) for form in forms)


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
