"""Merged models: their base's files, the load before they are called done, and what rounding leaves of the adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from offbook.base.errors import ConfigError, EngineError
from offbook.engine.learner.model import merge as merging
from offbook.engine.learner.model.merge import merge
from tests.families.bases import BASES, write_random
from tests.families.builders import GEMMA3, QWEN2_5, VOCABULARY, build, make_tokenizer

IMAGE_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
LLAMA3_ROPE = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(QWEN2_5, tmp_path_factory.mktemp("base") / "qwen")


@pytest.fixture(scope="module")
def with_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 as it is published: a tokenizer with tokens of images, and a processor in files of its own."""
    tokenizer = make_tokenizer(replace(GEMMA3, special=(*GEMMA3.special, *IMAGE_TOKENS.values())))
    [gemma] = [one for one in BASES if one.name == "Gemma 3"]
    text = {**gemma.values["text_config"], "vocab_size": VOCABULARY}
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS["image_token"])
    values = {**gemma.values, "text_config": text, "image_token_index": image_token}
    folder = write_random(replace(gemma, values=values), tmp_path_factory.mktemp("base") / "gemma")
    tokenizer.save_pretrained(folder)
    own = {"processor_class": "Gemma3Processor", "image_seq_length": 1}
    size = {"size": {"height": 28, "width": 28}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    changed(folder / "tokenizer_config.json", extra_special_tokens=IMAGE_TOKENS)
    changed(folder / "processor_config.json", **own)
    changed(folder / "preprocessor_config.json", image_processor_type="Gemma3ImageProcessor", **own, **size)
    return folder


def changed(file: Path, **values: object) -> None:
    content = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | values), "utf-8")


def write_adapter(base: Path, folder: Path, size: float) -> Path:
    """A LoRA whose B has entries of about this size."""
    torch.manual_seed(5)
    plain = merging.architecture_of(merging.AutoConfig.from_pretrained(base)).from_pretrained(base)
    model: Any = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=size)
    model.save_pretrained(folder)
    return folder


def test_a_merged_base_with_a_vision_tower_loads_with_its_processor_and_reads_an_image_as_the_adapter_does(
    with_images: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(with_images, tmp_path / "adapter", 0.1)
    merged = merge(with_images, adapter, tmp_path / "merged", torch.float32)
    assert "tokenizer and the logits after one token" in merged.note
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (merged.path / name).read_bytes() == (with_images / name).read_bytes()
    picture = Image.fromarray(np.full((28, 28, 3), 90, np.uint8))
    inputs = AutoProcessor.from_pretrained(merged.path)(
        text="<start_of_image> What is it?", images=[picture], return_tensors="pt"
    )
    plain = AutoModelForImageTextToText.from_pretrained(merged.path)
    policy = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(with_images), adapter)
    with torch.inference_mode():
        torch.testing.assert_close(plain(**inputs).logits, policy(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_how_much_of_the_adapter_rounding_leaves_is_measured_and_said(base: Path, tmp_path: Path) -> None:
    small = write_adapter(base, tmp_path / "adapter", 1e-3)
    exact = merge(base, small, tmp_path / "float32", torch.float32)
    assert exact.adapter_kept > 0.9999 and "format peft" not in exact.note
    rounded = merge(base, small, tmp_path / "bfloat16", torch.bfloat16)
    assert rounded.adapter_kept == pytest.approx(correlation(base, small, rounded.path), abs=1e-3)
    assert 0.2 < rounded.adapter_kept < 0.9
    assert f"In bfloat16, the weights' change has a correlation of {rounded.adapter_kept:.2f}" in rounded.note
    assert "Export the adapter (format peft)" in rounded.note
    half = merge(base, small, tmp_path / "float16", torch.float32, gguf=True)
    assert rounded.adapter_kept < half.adapter_kept < 1
    large = merge(base, write_adapter(base, tmp_path / "large", 0.3), tmp_path / "large-bf16", torch.bfloat16)
    assert large.adapter_kept > 0.95 and "format peft" not in large.note


def correlation(base: Path, adapter: Path, merged: Path) -> float:
    """From the three folders' files."""
    factors = load_file(adapter / "adapter_model.safetensors")
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    wanted, changes = list[torch.Tensor](), list[torch.Tensor]()
    for name, first in factors.items():
        if "lora_A" in name:
            weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            wanted.append((factors[name.replace("lora_A", "lora_B")] @ first * 2).flatten())
            changes.append((after[weight].float() - before[weight].bfloat16().float()).flatten())
    return float(torch.nn.functional.cosine_similarity(torch.cat(wanted), torch.cat(changes), dim=0))


def test_a_merged_model_that_does_not_load_is_no_export(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", 0.1)
    monkeypatch.setattr(merging, "copy_files", lambda base, folder: None)
    with pytest.raises(EngineError, match="tokenizer is not the base's"):
        merge(base, adapter, tmp_path / "out" / "merged", torch.float32)
    assert not any((tmp_path / "out").iterdir())


def test_files_that_give_other_logits_than_the_merged_model_are_no_export(base: Path) -> None:
    model = merging.architecture_of(merging.AutoConfig.from_pretrained(base)).from_pretrained(base)
    expected = merging.logits(model, base)
    merging.check(base, base, expected, torch.float32)
    for other in (expected.flip(0), expected * float("nan")):
        with pytest.raises(EngineError, match="other logits than the model"):
            merging.check(base, base, other, torch.float32)


def test_a_generation_config_that_transformers_would_refuse_to_write_is_the_bases_own(
    base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", 0.1)
    folder = tmp_path / "base"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    changed(folder / "generation_config.json", temperature=0.9, top_p=0.6)  # Llama 2's, without do_sample
    merged = merge(folder, adapter, tmp_path / "merged", torch.float32)
    assert json.loads((merged.path / "generation_config.json").read_text()) == {"temperature": 0.9, "top_p": 0.6}


# ---- for llama.cpp's converter, also for one that knows transformers 4 only


def test_float32_becomes_float16_and_sixteen_bits_stay(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", 0.1)
    for dtype, stored in ((torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)):
        merged = merge(base, adapter, tmp_path / str(dtype), dtype, gguf=True)
        weights = load_file(merged.path / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {stored}
        config = json.loads((merged.path / "config.json").read_text())
        name = str(stored).removeprefix("torch.")
        assert (config["dtype"], config["torch_dtype"], config["rope_theta"]) == (name, name, 1e4)
        settings = json.loads((merged.path / "tokenizer_config.json").read_text())
        template = (base / "chat_template.jinja").read_text("utf-8")
        assert settings == json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": template}


def test_a_weight_that_float16_cannot_hold_is_refused_by_its_name(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", 1e6)
    with pytest.raises(ConfigError, match=r"_proj\.weight has values beyond float16"):
        merge(base, adapter, tmp_path / "merged", torch.float32, gguf=True)


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 1e6, "rope_type": "default"}, 1e6, None),
        (LLAMA3_ROPE, 5e5, {"rope_type": "llama3", "factor": 8.0}),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, None, None),
    ],
)
def test_ropes_numbers_are_also_where_transformers_4_had_them(
    tmp_path: Path, rope: Any, theta: float | None, scaling: Any
) -> None:
    changed(tmp_path / "config.json", dtype="bfloat16", rope_parameters=rope)
    merging.make_ready(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config.get("rope_theta"), config.get("rope_scaling")) == (theta, scaling)
    assert config["rope_parameters"] == rope
