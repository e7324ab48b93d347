"""What an architecture's config.json, and transformers' calls, say of its attention."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' configs are only partly typed.

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which transformers tells an attention function of capped scores, sinks and biases. None of ours, and not SDPA,
computes them."""


@dataclass(frozen=True)
class AttentionSize:
    """The sizes of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


def attention_sizes(config: PreTrainedConfig) -> tuple[AttentionSize, ...]:
    """The different sizes among the layers of a text model, in their order. Gemma 4's full and sliding layers differ."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    return tuple(dict.fromkeys(_attention_size(layer) for layer in layers))


def _attention_size(config: PreTrainedConfig) -> AttentionSize:
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionSize(heads, int(getattr(config, "num_key_value_heads", None) or heads), int(width))
