"""The GPU benchmark's script, on a CPU: what it prints and writes, not what it measures."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.paths import ROOT

FOLDER = ROOT / "benchmarks"
COMMAND = ["--shape", "micro", "--device", "cpu", "--repeats", "2"]
NOT_NEEDED = ("pydantic", "openai", "fastapi", "sqlalchemy", "uvicorn", "orjson", "trl", "vllm", "unsloth", "datasets")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *more: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *COMMAND, "--output", str(output), *more])
    script.main()
    return json.loads((output / "gpu.json").read_text())["rows"]


@pytest.mark.slow("the GPU benchmark")
def test_it_runs_with_torch_transformers_and_peft_alone_and_every_way_gives_the_same_gradient(tmp_path: Path) -> None:
    program = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"
        f"sys.path.insert(0, {str(FOLDER)!r}); sys.argv = ['gpu.py', *{COMMAND!r}, '--peak-tflops', '1',"
        f" '--output', {str(tmp_path)!r}]\n"
        f"runpy.run_path({str(FOLDER / 'gpu.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert len({(row["group"], row["way"]) for row in rows}) == len(rows) == 10
    for row in rows:
        assert row["note"] == ""
        assert len(row["seconds"]) == 2
        assert row["gradient_difference"] < 1e-5
    assert [row["computed_tokens"] for row in rows[:3]] == [4 * 52, 4 * 52, 40 + 4 * 12]
    assert {row["useful_tokens"] for row in rows[:5]} == {40 + 4 * 12}
    table = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| micro")]
    assert len(table) == 10
    assert {line.count("|") for line in table} == {16}
    seconds = sorted(rows[0]["seconds"])
    used = f"{rows[0]['flops'] / (sum(seconds) / 2) / 1e12:.1%}"
    assert re.search(rf"\| {re.escape(used)} \| 0.0e\+00 \|", table[0])


@pytest.mark.slow("the GPU benchmark")
def test_a_way_that_runs_out_of_memory_says_so_and_the_rest_goes_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = script.Learner.step

    def tight(self, made, way, *rest) -> None:
        if "dense" in way.name:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, made, way, *rest)

    monkeypatch.setattr(script.Learner, "step", tight)
    rows = run(script, monkeypatch, tmp_path)
    assert {row["note"] for row in rows if "dense" in row["way"]} == {"out of memory"}
    assert all(row["seconds"] for row in rows if "dense" not in row["way"])
    assert "| out of memory |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow("the GPU benchmark")
def test_a_way_that_fails_is_named_in_the_table_and_by_the_exit_status(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self, row, way, targets) -> torch.Tensor:
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(script.Learner, "_logprobs", broken)
    with pytest.raises(SystemExit, match="10 of 10 measurements failed"):
        run(script, monkeypatch, tmp_path)
    assert "failed: RuntimeError: a kernel failed" in (tmp_path / "gpu.md").read_text()


def test_what_does_not_fit_into_the_budget_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (row,) = run(script, monkeypatch, tmp_path, "--budget", "-1")
    assert row["note"] == "not run: the time budget is used up"


def test_in_sixteen_bits_it_measures_the_lora_layers_that_users_get(script: ModuleType) -> None:
    shape = next(shape for shape in script.SHAPES.values() if shape.name == "micro")
    layers = 7 * shape.layers
    assert script.Learner(shape, torch.device("cpu"), torch.bfloat16).adapted == layers
    assert (
        script.Learner(shape, torch.device("cpu"), torch.float32).adapted == 0
    )  # float32 is PEFT's own in training too
