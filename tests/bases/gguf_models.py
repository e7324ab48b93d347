"""Small random models of each family, and a writer of their GGUF files in llama.cpp's layout (`convert_hf_to_gguf.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 320,
}
CONTROL, USER_DEFINED, BYTE, UNKNOWN, NORMAL = 3, 4, 6, 2, 1
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        **SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Source:
    """A model and what is written about it: keys, tokens, and its tensors by GGUF's names, as float32."""

    family: str
    model: PreTrainedModel
    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> Path:
        writer = GGUFWriter(path, self.family)
        for key, value in self.keys.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, values in self.tensors.items():
            if values.ndim == 1 or kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, values)
            elif kind == GGMLQuantizationType.F16:
                writer.add_tensor(name, values.astype(np.float16))
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def byte_level(pre: str = "smollm") -> dict[str, Any]:
    """The keys of a tokenizer with GPT-2's bytes, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=310, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(["the question of the other day", "an answer to it, and another"] * 9, trainer)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    text = tokenizer.to_str()

    merges = [" ".join(pair) for pair in json.loads(text)["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentence_piece(prefix: bool) -> dict[str, Any]:
    """The keys of a tokenizer with scores and byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "t", "h", "e", "a", "n", "s", "▁t", "he", "▁the", "an", "▁an", "\n\n"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(words) - 1), USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.scores": [0.0] * len(tokens) + [-float(rank) for rank in range(len(words))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def make_source(family: str, **changes: Any) -> Source:
    """A random model of a family, written as llama.cpp writes it. `changes`: fields of its configuration."""
    config = CONFIGS[family]
    config = type(config)(**config.to_dict() | changes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    tensors: dict[str, np.ndarray] = {}
    for name, values in model.state_dict().items():
        tensors |= _written(family, name, values.numpy(), config)
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters.get("rope_theta") or config.rope_parameters["full_attention"]["rope_theta"]
    keys = {
        f"{family}.{key}": value
        for key, value in {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.freq_base": float(theta),
        }.items()
    }
    if family == "gemma3":
        keys["gemma3.attention.sliding_window"] = config.sliding_window
    tokenizer = (
        sentence_piece(prefix=False) if family == "gemma3" else byte_level("qwen2" if "qwen" in family else "smollm")
    )
    return Source(family, model, keys | tokenizer, tensors)


def _written(family: str, name: str, values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if family == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    if name in plain:
        return {plain[name]: values}
    _, _, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    if family == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return {
        f"blk.{layer}.{(GEMMA_NAMES if family == 'gemma3' else NAMES)[part]}.{suffix}": np.ascontiguousarray(values)
    }
