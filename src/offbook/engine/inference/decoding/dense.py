"""One token of each row through a dense decoder (Llama, Qwen2, Qwen3) on a CPU, where transformers' modules take as long as the
arithmetic. Weights that read the same input stand side by side, [in, out], which a CPU reads faster for one row than [out, in]."""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# transformers' modules are only partly typed.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from .adapters import AdapterLayers
from .kv_cache import KVCache

_ARCHITECTURES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def packs_of(model: PreTrainedModel) -> list[list[str]]:
    """Names of the linear layers of `model` that are packed together; empty if `DenseDecoder` does not decode it."""
    config = model.config
    dense = (
        type(model) in _ARCHITECTURES
        and model.device.type == "cpu"
        and model.dtype == torch.float32
        and config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )
    if not dense:
        return []
    packs = [["lm_head"]]
    for index in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        packs += [[attention + name for name in _QKV], [attention + "o_proj"]]
        packs += [[mlp + name for name in _GATE_UP], [mlp + "down_proj"]]
    return packs


@dataclass(frozen=True)
class _Layer:
    """What one layer computes with; `qkv` to `down` map [B, in] to [B, out] by the active weights."""

    input_norm: nn.Module
    qkv: Callable[[Tensor], Tensor]
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    out: Callable[[Tensor], Tensor]
    mlp_norm: nn.Module
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]


class DenseDecoder:
    """The decode pass of a model for which `packs_of` names packs, with the adapter that is active in `layers`."""

    def __init__(self, model: PreTrainedModel, layers: AdapterLayers) -> None:
        modules: dict[str, Any] = dict(model.named_modules())

        def packed(prefix: str, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
            pack = layers.pack(prefix + names[0])
            biases: list[Tensor | None] = [modules[prefix + name].bias for name in names]
            bias = torch.cat([one for one in biases if one is not None]) if biases[0] is not None else None
            return lambda inputs: linear(inputs, pack.active.t(), bias)

        self._model = model
        self._final_norm = modules["model.norm"]
        self._head = packed("", ["lm_head"])
        self._layers: list[_Layer] = []
        for index in range(model.config.num_hidden_layers):
            layer = f"model.layers.{index}."
            attention = modules[layer + "self_attn"]
            self._layers.append(
                _Layer(
                    modules[layer + "input_layernorm"],
                    packed(layer + "self_attn.", _QKV),
                    getattr(attention, "q_norm", None),
                    getattr(attention, "k_norm", None),
                    packed(layer + "self_attn.", ["o_proj"]),
                    modules[layer + "post_attention_layernorm"],
                    packed(layer + "mlp.", _GATE_UP),
                    packed(layer + "mlp.", ["down_proj"]),
                )
            )
        first = modules["model.layers.0.self_attn"]
        self._width, self._scale = int(first.head_dim), float(first.scaling)
        self._heads, self._kv_heads = int(model.config.num_attention_heads), int(model.config.num_key_value_heads)

    def decode(self, cache: KVCache, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits float32 [B, V] of tokens [B] at `positions` [B]; mask additive [B, 1, 1, K], None if all keys are seen."""
        batch, heads, kv_heads, width = len(tokens), self._heads, self._kv_heads, self._width
        hidden = self._model.get_input_embeddings()(tokens)
        cos, sin = self._model.model.rotary_emb(hidden, position_ids=positions[:, None])  # [B, 1, width]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(_normed(hidden, layer.input_norm)).view(batch, heads + 2 * kv_heads, width)
            rotated, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = rotated[:, :heads], rotated[:, heads:]
                rotated = torch.cat([_normed(query, layer.query_norm), _normed(key, layer.key_norm)], 1)
            half = width // 2
            turned = torch.cat([-rotated[..., half:], rotated[..., :half]], -1)
            rotated = rotated * cos + turned * sin
            query = rotated[:, :heads].view(batch, kv_heads, heads // kv_heads, width)
            keys, values = cache.update(rotated[:, heads:, None], value[:, :, None], index)
            seen = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._scale)
            hidden = hidden + layer.out(seen.reshape(batch, heads * width))
            gate, up = layer.gate_up(_normed(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up)
        return self._head(_normed(hidden, self._final_norm))


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)
