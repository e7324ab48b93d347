"""A merged folder made ready for llama.cpp's converter, also for one that knows transformers 4 only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from offbook.server.training.export_folders import make_ready

LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Its tokenizer's files are its own, unlike those that are written when it is loaded and saved."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"of": "the base"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages }} é")
    return folder


def merged(folder: Path, dtype: str = "float32", rope: Any = None, weight: float = 1.5) -> Path:
    """Two shards with their index, and the tokenizer as transformers 5 saves it."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "dtype": dtype,
        "rope_parameters": rope or {"rope_theta": 1e4, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (folder / "special_tokens_map.json").write_text("{}")
    kind = np.float32 if dtype == "float32" else np.float16
    for at, name in enumerate(("a", "b")):
        save_file({name: np.full((4, 2), weight, kind)}, folder / f"model-0000{at + 1}-of-00002.safetensors")
    index = {"metadata": {"total_size": 64}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8"))


def test_float32_becomes_float16_in_every_shard_and_the_index_counts_it(base: Path, tmp_path: Path) -> None:
    folder = merged(tmp_path / "model")
    make_ready(folder, base)
    for file in folder.glob("*.safetensors"):
        for weight in load_file(file).values():
            assert weight.dtype == np.float16 and (weight == 1.5).all()
    assert read(folder / "model.safetensors.index.json")["metadata"]["total_size"] == 2 * 4 * 2 * 2
    config = read(folder / "config.json")
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16")
    assert not list(folder.glob("*.part"))


def test_sixteen_bit_weights_stay_byte_for_byte(base: Path, tmp_path: Path) -> None:
    folder = merged(tmp_path / "model", "bfloat16")
    before = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    make_ready(folder, base)
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == before
    assert read(folder / "config.json")["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("weight", [7e4, -7e4, float("nan"), float("inf")])
def test_a_weight_that_float16_cannot_hold_is_refused_by_its_name(base: Path, tmp_path: Path, weight: float) -> None:
    with pytest.raises(ValueError, match="a has values beyond float16"):
        make_ready(merged(tmp_path / "model", weight=weight), base)


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 1e6, "rope_type": "default"}, 1e6, None),
        (LLAMA3, 5e5, {"rope_type": "llama3", "factor": 8.0}),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, None, None),
    ],
)
def test_ropes_numbers_are_also_where_transformers_4_had_them(
    base: Path, tmp_path: Path, rope: Any, theta: float | None, scaling: Any
) -> None:
    folder = merged(tmp_path / "model", rope=rope)
    make_ready(folder, base)
    config = read(folder / "config.json")
    assert (config.get("rope_theta"), config.get("rope_scaling")) == (theta, scaling)
    assert config["rope_parameters"] == rope


def test_the_tokenizer_is_the_bases_own_and_its_settings_hold_the_chat_template(base: Path, tmp_path: Path) -> None:
    folder = merged(tmp_path / "model")
    make_ready(folder, base)
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (folder / "special_tokens_map.json").exists()  # the base has none
    assert read(folder / "tokenizer_config.json") == {
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": "{{ messages }} é",
    }
