"""A driver that is too old for torch: no process falls back to the CPU without a word."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offbook.base.devices import driver_version
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions
from offbook.engine import base_model
from offbook.engine.inference.vllm import command as vllm
from offbook.engine.precision import device_name
from offbook.server.base_model import find
from offbook.server.sampler.engine_choice import choose
from offbook.server.training.learner_client import LearnerClient
from offbook.tiny import path as tiny_policy
from tests.server.sampler.cards import GIB, H100

CARD = H100.format(index=0, free=79 * GIB)
OLD = r"torch .* cannot use a GPU, as driver 570.86.15 is too old for CUDA 13.0, which needs 580 or newer: update the driver"


def device_of(argv: list[str]) -> str:
    return argv[argv.index("--device") + 1]


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built for CUDA 13 and cannot use the GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("options", [{"engine": "vllm"}, {"engine": "embedded", "train_gpus": "0"}])
def test_both_processes_are_told_cuda_where_a_gpu_was_chosen(
    driver, tmp_path: Path, options: dict[str, object]
) -> None:
    driver(CARD)
    engine = choose(EngineOptions.parse(**options), "tiny", trains=True)
    learner = LearnerClient(find("tiny"), engine.options, tmp_path / "learner.log")
    assert device_of(learner._argv()) == device_of(engine.command(Path("base"), Path("socket"))) == "cuda"
    for other in (EngineOptions(device="cpu"), EngineOptions(engine="embedded")):
        assert choose(other, "tiny", trains=True).options.device == other.device


def test_the_learner_refuses_cuda_with_the_driver_that_it_needs(driver, cuda_build: None) -> None:
    driver(CARD, version="570.86.15")
    assert driver_version() == "570.86.15"
    with pytest.raises(ConfigError, match=f"^--device cuda: {OLD}, or use --device cpu$"):
        device_name("cuda")
    driver(CARD, version="580.65.06")
    with pytest.raises(ConfigError, match=r"with driver 580.65.06: `python -c .*` says why"):
        device_name("cuda:0")


def test_auto_takes_the_cpu_beside_a_gpu_only_with_a_warning(
    driver, cuda_build: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert device_name("auto") == "cpu" and not caplog.text
        driver(CARD, version="570.86.15")
        assert device_name("auto") == "cpu"
    assert "This machine has a GPU, but the CPU is used: torch" in caplog.text and "driver 570.86.15" in caplog.text


def test_vllm_is_not_started_with_it_and_the_reason_is_the_last_line(
    driver, cuda_build: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(CARD, version="570.86.15")
    checked: list[str] = []

    def run(words: list[str], check: bool) -> object:
        checked.extend(words[1:])
        monkeypatch.setattr("sys.argv", ["base_weights", *words[3:]])
        return SimpleNamespace(returncode=base_model.main())

    monkeypatch.setattr(vllm, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(vllm, "_check_version", lambda: None)
    monkeypatch.setattr(vllm, "gpus", lambda: (SimpleNamespace(index=0, capability=(9, 0)),))
    assert (
        vllm.main(["--model", str(tiny_policy()), "--served-model-name", "b", "--uds", "/s", "--device", "cuda"]) == 2
    )
    assert checked[-1] == "--cuda"
    assert "570.86.15 is too old for CUDA 13.0" in capsys.readouterr().err.splitlines()[-1]
