"""Exported folders without Offbook's server: transformers and PEFT give its greedy answers, token for token, and the
logprobs of what it sampled. The export for llama.cpp: a plain 16-bit model folder, and the command that makes one file
of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.utils.function_calling import convert_to_openai_tool
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbook import LocalBackend, tiny
from tests.production.conftest import Trained
from tests.production.order_desk import QUESTIONS, TOOLS

Answer = tuple[list[int], list[int]]
"""Token ids of the prompt and of the answer, its end token left out."""
Scored = tuple[list[int], list[int], list[float]]
"""Token ids of the prompt and of the answer, and the answer's logprobs."""


async def served(desk: Trained, step: int) -> list[Answer]:
    """What the server answers at temperature 0."""
    return [(prompt, answer) for prompt, answer, _ in await asked(desk, step, 0.0)]


async def asked(desk: Trained, step: int, temperature: float) -> list[Scored]:
    client = desk.model.openai_client()
    answers: list[Scored] = []
    tools: list[Any] = [convert_to_openai_tool(each) for each in TOOLS]
    for question in QUESTIONS:
        answer = await client.chat.completions.create(
            model=desk.model.inference_name(step),
            messages=[{"role": "user", "content": question}],
            tools=tools,
            temperature=temperature,
            max_tokens=64,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        fields: dict[str, Any] = answer.model_dump()
        choice = fields["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        answers.append((fields["prompt_token_ids"], choice["token_ids"], logprobs))
    return answers


def generated(model: Any, tokenizer: Any) -> list[Answer]:
    """What plain `generate` answers on the tokenizer's own chat template."""
    tools = [convert_to_openai_tool(each) for each in TOOLS]
    answers: list[Answer] = []
    for question in QUESTIONS:
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tools=tools,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            made = model.generate(**given, do_sample=False, max_new_tokens=64)
        prompt = given["input_ids"][0].tolist()
        answers.append((prompt, made[0].tolist()[len(prompt) :]))
    return answers


def logprob_difference(model: Any, sampled: list[Scored]) -> float:
    """The largest difference between the recorded logprobs and those that `model` gives the same tokens."""
    differences: list[float] = []
    for prompt, answer, recorded in sampled:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        given = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        differences.append(float((given - torch.tensor(recorded)).abs().max()))
    return max(differences)


def without_end(answers: list[Answer], end: int) -> list[Answer]:
    return [(prompt, answer[:-1] if answer[-1] == end else answer) for prompt, answer in answers]


@pytest.mark.slow("merged models")
async def test_the_merged_model_in_plain_transformers_gives_the_servers_greedy_answers(desk: Trained) -> None:
    tokenizer = AutoTokenizer.from_pretrained(desk.merged)
    end = tokenizer.eos_token_id
    merged = AutoModelForCausalLM.from_pretrained(desk.merged)
    assert without_end(generated(merged, tokenizer), end) == without_end(await served(desk, 1), end)


@pytest.mark.slow("merged models")
async def test_the_merged_model_gives_the_logprobs_of_what_the_trained_step_sampled_and_not_the_bases(
    desk: Trained,
) -> None:
    merged = AutoModelForCausalLM.from_pretrained(desk.merged)
    assert logprob_difference(merged, await asked(desk, 1, 1.0)) < 1e-3
    assert logprob_difference(merged, await asked(desk, 0, 1.0)) > 1e-2


@pytest.mark.slow("merged models")
async def test_the_exported_lora_in_peft_gives_the_servers_greedy_answers(desk: Trained) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_of(desk.lora), dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, desk.lora)
    tokenizer = AutoTokenizer.from_pretrained(base_of(desk.lora))
    end = tokenizer.eos_token_id
    assert without_end(generated(model, tokenizer), end) == without_end(await served(desk, 1), end)
    with model.disable_adapter():
        assert without_end(generated(model, tokenizer), end) == without_end(await served(desk, 0), end)


def base_of(lora: Path) -> str:
    """The folder of the base that an exported LoRA names."""
    return str(tiny.path(json.loads((lora / "adapter_config.json").read_text())["base_model_name_or_path"]))


@pytest.mark.slow("merged models")
def test_the_export_for_llama_cpp_is_the_merged_model_in_float16_with_the_next_command(
    desk: Trained, local_backend: LocalBackend, tmp_path: Path
) -> None:
    output = tmp_path / "desk gguf"
    done = subprocess.run(
        [sys.executable, "-m", "offbook", "export", desk.model.name, "--dir", str(local_backend.dir),
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
    assert "In float16, the weights' change has a correlation of " in done.stderr
    assert "Loaded once and compared: configuration, every weight, tokenizer and the logits" in done.stderr
    assert {file.stat().st_mode & 0o777 for file in output.iterdir()} == {0o644}
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
