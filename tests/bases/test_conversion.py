"""A GGUF file becomes the model that it was written of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from offbook.base.errors import ConfigError
from offbook.engine.chat_template import ChatTemplate
from offbook_bases.conversion import convert

from .gguf_models import CONFIGS, Source, byte_level, make_source, sentence_piece


def converted(source: Source, folder: Path, kind: Kind = Kind.F32) -> Path:
    (folder / "base").mkdir()
    convert(source.write(folder / "model.gguf", kind), folder / "base", None)
    return folder / "base"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_model_computes_what_the_original_does(family: str, tmp_path: Path) -> None:
    source = make_source(family)
    folder = converted(source, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits(model), logits(source.model), rtol=1e-5, atol=1e-5)
    assert model.config.tie_word_embeddings is source.model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("gemma3", {"rope_type": "linear", "factor": 8.0}),
    ],
)
def test_a_rope_scaling_is_the_originals(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 1e4}
        rope: Any = {"full_attention": {**scaling, "rope_theta": 1e6}, "sliding_attention": local}
    else:
        rope = {**scaling, "rope_theta": 1e4}
    source = make_source(family, rope_parameters=rope)
    source.keys[f"{family}.rope.scaling.type"] = scaling["rope_type"]
    source.keys[f"{family}.rope.scaling.factor"] = scaling["factor"]
    if original := scaling.get("original_max_position_embeddings"):
        source.keys[f"{family}.rope.scaling.original_context_length"] = original
    model: Any = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path), attn_implementation="eager")
    torch.testing.assert_close(logits(model), logits(source.model), rtol=1e-5, atol=1e-5)


def test_the_factors_of_llama_3_are_recognised(tmp_path: Path) -> None:
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 5e5, **fixed}
    source = make_source("llama", rope_parameters=rope, max_position_embeddings=131_072)
    plain = 1.0 / 5e5 ** (np.arange(8) * 2 / 16)
    scaled = source.model.model.rotary_emb.inv_freq.numpy()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    source.tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    assert source.tensors["rope_freqs.weight"].max() == pytest.approx(32)
    model: Any = AutoModelForCausalLM.from_pretrained(converted(source, tmp_path), attn_implementation="eager")
    torch.testing.assert_close(logits(model), logits(source.model), rtol=1e-5, atol=1e-5)
    source.tensors["rope_freqs.weight"] *= 1.5
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"rope_freqs.weight has none of the factors"):
        convert(source.write(tmp_path / "other.gguf"), tmp_path / "other", None)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_quantised_weights_are_what_ggufs_own_package_dequantises(kind: Kind, tmp_path: Path) -> None:
    folder = converted(make_source("qwen2"), tmp_path, kind)
    weights = load_file(folder / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    for name, source in (("embed_tokens", "token_embd"), ("layers.3.mlp.down_proj", "blk.3.ffn_down")):
        tensor = tensors[f"{source}.weight"]
        assert np.array_equal(weights[f"model.{name}.weight"], dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_blocks_of_256_values_are_read_row_by_row(kind: Kind, tmp_path: Path) -> None:
    source = make_source("llama", hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    source.write(tmp_path / "plain.gguf")
    size = {Kind.Q4_K: 144, Kind.Q6_K: 210}[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (256, size), dtype=np.uint8)  # as float16, such bytes are finite
    from gguf import GGUFWriter

    written = GGUFWriter.add_tensor

    def add(self: Any, name: str, tensor: Any, *rest: Any, **named: Any) -> None:
        if name == "blk.0.attn_q.weight":
            written(self, name, blocks, raw_dtype=kind)
        else:
            written(self, name, tensor, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", add)
        folder = converted(source, tmp_path)
    values = dequantize(blocks, kind).reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"], values)


def test_the_tokenizer_its_ids_and_its_template_are_the_files(tmp_path: Path) -> None:
    folder = converted(make_source("llama"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.unk_token == "<|endoftext|>" and GenerationConfig.from_pretrained(folder).eos_token_id == 2
    ids = tokenizer.encode("12 and <|im_end|>")
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["1", "2"] and ids[-1] == 2
    template = ChatTemplate(tokenizer)
    text = template.render([{"role": "user", "content": "the question"}])
    assert text == "<|im_start|>user\nthe question<|im_end|>\n" and template.encode(text)[0] == 1
    assert [warning for warning in template.warnings(frozenset([2])) if "shows no tools" not in warning] == []
    assert json.loads((folder / "tokenizer.json").read_text())["normalizer"] is None


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_scores_merges_by_them_and_falls_back_to_bytes(prefix: bool, tmp_path: Path) -> None:
    source = make_source("llama")
    source.keys = {key: value for key, value in source.keys.items() if not key.startswith("tokenizer.")}
    source.keys |= sentence_piece(prefix)
    tokenizer = Tokenizer.from_file(str(converted(source, tmp_path) / "tokenizer.json"))
    first = ["▁the"] if prefix else ["t", "he"]
    assert tokenizer.encode("the an é").tokens == ["<s>", *first, "▁an", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("\n\n", add_special_tokens=False).tokens == ["\n\n"]
    ids = tokenizer.encode(" the  an é", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == " the  an é"


def test_a_tokenizer_beside_the_file_must_agree_with_it(tmp_path: Path) -> None:
    source = make_source("llama")
    folder = converted(source, tmp_path)
    (tmp_path / "again").mkdir()
    convert(tmp_path / "model.gguf", tmp_path / "again", folder / "tokenizer.json")
    original = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = original["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    (tmp_path / "other.json").write_text(json.dumps(original))
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer.json disagree on"):
        convert(tmp_path / "model.gguf", tmp_path / "other", tmp_path / "other.json")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["ĠIt", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "ĠX"]),
        ("qwen2", ["ĠIt", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "ĠX"]),
        ("llama-bpe", ["ĠIt", "'s", "Ġ", "123", "4", "ĊĊ", "ĠX"]),
    ],
)
def test_words_end_where_the_familys_tokenizer_ends_them(pre: str, words: list[str], tmp_path: Path) -> None:
    source = make_source("llama", num_hidden_layers=1)
    source.keys |= byte_level(pre)
    tokenizer = Tokenizer.from_file(str(converted(source, tmp_path) / "tokenizer.json"))
    parts = [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(" It's 1234\n\n X")]
    assert parts == words
    assert (tokenizer.encode("a").ids[0] == 1) is (pre == "llama-bpe")  # the only one that begins texts with bos
