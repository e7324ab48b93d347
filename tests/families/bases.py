"""Bases as they are published, a vision tower included, with random weights and a few layers. No tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from offbook.engine.base_model import architecture_of
from tests.engine.learner.tiny_models import VOCABULARY

WINDOW = 5
CAP = 3.0
"""Small, so that it reaches the logits."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SQUARE = {key: value for key, value in TEXT.items() if key != "head_dim"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
LAYERED_TOWER = {**TOWER, "num_hidden_layers": 1}
QWEN_TOWER = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
QWEN_IMAGES = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


@dataclass(frozen=True)
class Base:
    """`name`: in the table of docs/models.md. `config`: transformers' class of its config.json, and `values` its content.

    `embedded`: why the embedded engine refuses it; empty: it samples it.
    `whole`: the class it must be loaded as, whose names vLLM's adapters have. `left_out`: what an adapter leaves out.
    `layout`: what it is trained on."""

    name: str
    config: str
    values: dict[str, Any]
    whole: str
    left_out: tuple[str, ...] = ()
    layout: str = "trees"
    embedded: str = ""


BASES = (
    Base("Qwen2.5", "Qwen2Config", SQUARE, "Qwen2ForCausalLM"),
    Base("Qwen3", "Qwen3Config", TEXT, "Qwen3ForCausalLM"),
    Base("Llama 3", "LlamaConfig", TEXT, "LlamaForCausalLM"),
    Base("Mistral", "MistralConfig", {**TEXT, "sliding_window": WINDOW}, "MistralForCausalLM"),
    Base("OLMo 2", "Olmo2Config", SQUARE, "Olmo2ForCausalLM"),
    Base(
        "Qwen3 MoE",
        "Qwen3MoeConfig",
        {**TEXT, **EXPERTS, "moe_intermediate_size": 16},
        "Qwen3MoeForCausalLM",
        ("mlp.experts", "mlp.gate"),
    ),
    Base(
        "Mixtral",
        "MixtralConfig",
        {**TEXT, "num_local_experts": 4},
        "MixtralForCausalLM",
        ("mlp.experts", "mlp.gate"),
    ),
    Base("OLMoE", "OlmoeConfig", {**SQUARE, **EXPERTS}, "OlmoeForCausalLM", ("mlp.experts", "mlp.gate")),
    Base(
        "GLM-4 MoE",
        "Glm4MoeConfig",
        {
            **TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        "Glm4MoeForCausalLM",
        (
            "mlp.down_proj",
            "mlp.experts",
            "mlp.gate",
            "mlp.gate_proj",
            "mlp.shared_experts.down_proj",
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.up_proj",
        ),
    ),
    Base(
        "gpt-oss",
        "GptOssConfig",
        {
            **TEXT,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
        },
        "GptOssForCausalLM",
        ("mlp.experts", "mlp.router"),
        layout="plain rows",
        embedded="does not compute the attention of GptOssAttention (s_aux): use --engine vllm",
    ),
    Base(
        "Gemma 2",
        "Gemma2Config",
        {
            **TEXT,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": CAP,
            "attn_logit_softcapping": CAP,
        },
        "Gemma2ForCausalLM",
        layout="plain rows",
        embedded="does not compute the attention of Gemma2Attention (softcap): use --engine vllm",
    ),
    Base(
        "Gemma 3",
        "Gemma3Config",
        {
            "text_config": {**TEXT, "sliding_window": WINDOW, "layer_types": ALTERNATING},
            "vision_config": {**LAYERED_TOWER, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 1,
            "image_token_index": 3,
        },
        "Gemma3ForConditionalGeneration",
    ),
    Base(
        "Gemma 4",
        "Gemma4Config",
        {
            "text_config": {
                **TEXT,
                "pad_token_id": 0,
                "sliding_window": WINDOW,
                "layer_types": ALTERNATING,
                "global_head_dim": 16,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "num_kv_shared_layers": 2,
                "final_logit_softcapping": CAP,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
            },
            "vision_config": {**LAYERED_TOWER, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        },
        "Gemma4ForConditionalGeneration",
    ),
    Base(
        "Qwen3.5",
        "Qwen3_5Config",
        {
            "text_config": {
                **TEXT,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
            **QWEN_IMAGES,
        },
        "Qwen3_5ForConditionalGeneration",
        layout="plain rows",
        embedded="does not support layers of kind ['linear_attention'], only ['full_attention', 'sliding_attention']: use --engine vllm",
    ),
    Base(
        "Qwen2.5-VL",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**SQUARE, **SECTIONS},
            "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]},
            **QWEN_IMAGES,
        },
        "Qwen2_5_VLForConditionalGeneration",
    ),
    Base(
        "Qwen3-VL",
        "Qwen3VLConfig",
        {
            "text_config": {**TEXT, **SECTIONS},
            "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWEN_IMAGES,
        },
        "Qwen3VLForConditionalGeneration",
    ),
    Base(
        "Mistral Small 3",
        "Mistral3Config",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {
                **LAYERED_TOWER,
                "model_type": "pixtral",
                "head_dim": 8,
                "image_size": 32,
                "patch_size": 8,
            },
            "image_token_index": 3,
        },
        "Mistral3ForConditionalGeneration",
    ),
)


def write_random(base: Base, folder: Path) -> Path:
    """Write the base's folder. Its weights are large enough that every token matters."""
    make: Callable[..., PreTrainedConfig] = getattr(transformers, base.config)
    config = make(**base.values)
    torch.manual_seed(1)
    model = architecture_of(config)(config)
    for name, parameter in model.named_parameters():
        if "conv" not in name and (parameter.ndim >= 2 or name.endswith("sinks")):
            torch.nn.init.normal_(parameter, std=0.15 if parameter.ndim >= 2 else 1.0)
    model.save_pretrained(folder)
    return folder
