"""Liger's kernels in a base: real ones in Triton's interpreter, which runs them on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from offbook.base.errors import install_command
from offbook.engine.learner.model.layer_kernels import fuse
from tests.paths import ROOT

SECONDS = 600


@pytest.fixture(scope="module")
def measured(require: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require(importlib.util.find_spec("liger_kernel") is not None, install_command("liger"))
    file = tmp_path_factory.mktemp("liger") / "answers.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.learner.liger_answers", str(file)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text("utf-8"))


@pytest.mark.slow("kernels in an interpreter")
@pytest.mark.parametrize(("family", "modules"), [("llama", 7), ("mistral", 7), ("qwen2", 7), ("qwen3", 11)])
def test_kernels_have_the_logprobs_and_lora_gradients_of_the_plain_layers_on_a_tree(
    measured: dict[str, Any], family: str, modules: int
) -> None:
    answer = measured[family]
    assert answer["ran"].startswith("liger ") and answer["replaced"] == modules
    assert answer["logprobs"] < 1e-5 and answer["gradients"] < 1e-5


@pytest.mark.slow("kernels in an interpreter")
@pytest.mark.parametrize("fault", ["wrong", "nan", "failing"])
def test_a_kernel_that_is_wrong_or_fails_leaves_the_plain_layers(measured: dict[str, Any], fault: str) -> None:
    assert measured[fault] == {"ran": "torch", "same": True}


def test_another_architecture_keeps_its_layers() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    assert fuse(model) == "torch" and not any("forward" in vars(module) for module in model.modules())
    assert torch.is_grad_enabled()
