"""The export for llama.cpp: a plain 16-bit model folder, and the command that makes one file of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.production.conftest import Trained
from understudy import LocalBackend


def test_the_export_for_llama_cpp_is_the_merged_model_in_float16_with_the_next_command(
    desk: Trained, local_backend: LocalBackend, tmp_path: Path
) -> None:
    output = tmp_path / "desk gguf"
    done = subprocess.run(
        [sys.executable, "-m", "understudy", "export", desk.model.name, "--dir", str(local_backend.dir),
         "--format", "gguf-ready", "--output", str(output)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}\n"
    assert f"python llama.cpp/convert_hf_to_gguf.py '{output}' --outfile '{output}.gguf'" in done.stderr
    assert {file.name for file in output.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["desk gguf"]
    whole = load_file(desk.merged / "model.safetensors")
    half = load_file(output / "model.safetensors")
    assert set(half) == set(whole) and not [name for name in half if "lora" in name or "base_layer" in name]
    for name, weight in half.items():
        assert weight.dtype == torch.float16
        torch.testing.assert_close(weight.float(), whole[name].float(), rtol=1e-3, atol=1e-6)
    template = (desk.merged / "chat_template.jinja").read_text()
    assert json.loads((output / "tokenizer_config.json").read_text())["chat_template"] == template
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.float16
