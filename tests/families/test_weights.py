"""A base whose files lack weights, or are cut off, is refused by every engine before it is loaded."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbook.base.errors import ConfigError
from offbook.engine import base_model
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.learner.model.loaders import Loader, load_base
from tests.families.builders import ATTENTION, QWEN2_5, QWEN3_5, Family, build

FAMILIES = pytest.mark.parametrize("family", [*ATTENTION, QWEN3_5], ids=lambda family: family.name)
FILE = "model.safetensors"


def embedded(folder: Path) -> None:
    load_model(folder, device="cpu", dtype="float32", max_model_len=None)


def learner(folder: Path, loader: Loader = "peft") -> None:
    load_base(folder, loader, "cpu", torch.float32, four_bit=False)


def with_unsloth(folder: Path) -> None:
    learner(folder, "unsloth")


ENGINES = pytest.mark.parametrize("load", [embedded, learner, with_unsloth], ids=lambda load: load.__name__)
"""vLLM's command runs `base_weights` in a process: tests/engine/inference/vllm/test_command.py."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    root = tmp_path_factory.mktemp("families")

    def of(family: Family) -> Path:
        folder = root / family.name
        return folder if folder.exists() else build(family, folder)

    return of


@pytest.fixture
def copy(written: Callable[[Family], Path], tmp_path: Path) -> Callable[[Family], Path]:
    return lambda family: Path(shutil.copytree(written(family), tmp_path / family.name))


def without(folder: Path, name: str) -> Path:
    weights = load_file(folder / FILE)
    del weights[name]
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    return folder


def configured(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@FAMILIES
@ENGINES
def test_a_base_that_lacks_one_weight_is_refused_by_its_name(
    copy: Callable[[Family], Path], family: Family, load: Callable[[Path], None]
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=f"the files lack weights of .*: {name}. Download"):
        load(without(copy(family), name))


@FAMILIES
def test_an_output_layer_may_be_absent_only_if_it_is_the_embedding(
    copy: Callable[[Family], Path], family: Family
) -> None:
    folder = copy(family)
    base_model.check_weights(folder)
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        without(folder, "model.embed_tokens.weight")
    else:
        without(folder, "lm_head.weight")
    with pytest.raises(ConfigError, match=r": lm_head\.weight"):
        base_model.check_weights(folder)


@ENGINES
def test_files_that_are_cut_off_or_missing_are_named(
    copy: Callable[[Family], Path], load: Callable[[Path], None]
) -> None:
    folder = copy(QWEN2_5)
    content = (folder / FILE).read_bytes()
    for kept in (content[:-100], content[:10], b""):
        (folder / FILE).write_bytes(kept)
        with pytest.raises(ConfigError, match=r"model\.safetensors is missing or cut off"):
            load(folder)
    (folder / FILE).unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(folder)


@ENGINES
def test_a_vocabulary_that_does_not_fit_the_embeddings_is_refused_with_both_sizes(
    copy: Callable[[Family], Path], load: Callable[[Path], None]
) -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight \(768 x 64 in the files, 700 x 64 by config\.json\)"):
        load(configured(copy(QWEN2_5), vocab_size=700))


@ENGINES
def test_a_base_quantized_for_inference_is_refused_by_its_method(
    copy: Callable[[Family], Path], load: Callable[[Path], None]
) -> None:
    folder = configured(copy(QWEN2_5), quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(ConfigError, match=r"the base is quantized \(gptq\).*use the original weights"):
        load(folder)


def test_vllm_may_load_what_it_alone_knows_and_nothing_that_is_incomplete(
    copy: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(QWEN2_5)
    monkeypatch.setattr(sys, "argv", ["base_weights", str(folder)])
    configured(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert base_model.main() == 0
    configured(folder, quantization_config=None, model_type="newer_than_transformers")
    assert base_model.main() == 0
    assert "were not checked" in capsys.readouterr().err
    configured(without(folder, "model.norm.weight"), model_type="qwen2")
    assert base_model.main() == 2
    assert "model.norm.weight" in capsys.readouterr().err
