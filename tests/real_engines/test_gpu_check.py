"""scripts/gpu_check on a CPU: each stage runs on a tiny shape and writes its table; what it measures is for a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Stage
from tests.paths import ROOT

FIRST, BARE = "first", ["rows-micro", "flex-micro"]
SERVER = ["server-micro-peft-side_by_side", "server-micro-peft-offload"]


def check(output: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu_check"), str(output), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow("the GPU benchmark")
def test_a_bare_stage_writes_what_it_measured(tmp_path: Path) -> None:
    done = check(tmp_path, "--set", "full", "--shape", "micro", "--stage", FIRST)
    page = (tmp_path / "gpu_check.md").read_text("utf-8")
    assert done.returncode == 0, done.stdout + done.stderr + page
    assert re.search(rf"^\| {FIRST} \| \d+ \| ok \|$", page, re.MULTILINE)
    assert "| peft: mask_probe | ok, differs by" in page, page
    assert not (tmp_path / FIRST / "base").exists()


def test_a_stage_that_fails_or_hangs_is_a_line_of_the_table_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such card')")
    (tmp_path / "hangs.py").write_text("import time; print('waiting', flush=True); time.sleep(600)")
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    ended = [gpu_check.run(Stage(name, (f"{name}.py",), "none.md"), tmp_path / name, 3) for name in ("broken", "hangs")]
    assert [each.ending for each in ended] == ["exit code 1", "not done after 3 s"]
    page = gpu_check.page(ended, tmp_path)
    assert "| broken | 0 | exit code 1 |" in page and "no such card" in page and "waiting" in page


def test_every_stage_is_shorter_than_9_minutes_and_these_are_all_there_are() -> None:
    assert gpu_check.STAGE_SECONDS < 540
    assert [stage.name for stage in gpu_check.stages("full", ("micro",))] == [FIRST, *BARE, *SERVER]
    names = [stage.name for stage in gpu_check.stages("full", ("0.5B", "7B"))]
    assert len(names) == 17 and {"server-7B-unsloth-free_cache", "server-7B-peft-free_cache"} <= set(names)
    assert [stage.name for stage in gpu_check.stages("bare", ("0.5B", "7B"))] == names[1:5]
    assert (names[0], gpu_check.stages("full", ("0.5B",))[0].limit) == (FIRST, 300)


def test_the_weights_of_a_stage_that_fails_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    words = [
        "gpu_server",
        "--shape",
        "micro",
        "--memory-layout",
        "offload",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_server = importlib.import_module("gpu_server")
    monkeypatch.setattr("sys.argv", words)

    def broken(options: object, folder: Path) -> None:
        raise SystemExit("the server did not start")

    monkeypatch.setattr(gpu_server, "_measure", broken)
    with pytest.raises(SystemExit, match="did not start"):
        gpu_server.main()
    assert not (tmp_path / "base").exists()
