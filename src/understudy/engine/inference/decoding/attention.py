"""The attention function of the embedded engine, registered with transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "understudy_kv_cache"


def register() -> None:
    """Register `attn_implementation=NAME` with transformers. Can be called repeatedly."""
    AttentionInterface.register(NAME, cache_attention)  # pyright: ignore[reportUnknownMemberType]  # transformers' registry is only partly typed


def cache_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, Q, D] to key, value [B, KV, K, D] with an additive mask [B, 1, Q, K]; returns [B, Q, H, D].

    Without a mask, a single query attends to every key, and several queries are causal. For a single query the heads that
    share a key become the query dimension, so that keys are read once and not repeated.
    """
    batch, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    if queries == 1:
        folded = query.view(batch, key.shape[1], shared, width)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if shared > 1 and query.device.type != "cpu":
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=shared > 1 and query.device.type == "cpu",
    )
    return out.transpose(1, 2), None


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask [B, Q, K] (True: attend) to an additive mask [B, 1, Q, K]."""
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, None]
