"""Attention over the slots of the embedded engine: transformers' seam for attention functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "understudy_slots"


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, slot_attention)  # pyright: ignore[reportUnknownMemberType]  # transformers' registry is only partly typed


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [B, H, Q, D]; key, value [B, KV, K, D]; additive mask [B, 1, Q, K]; gives [B, Q, H, D].

    Without a mask, one query sees every key, and several are causal. A single query folds the heads that share a key
    into the query dimension, so that keys are read once and never repeated.
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
    """A bool mask [B, Q, K] (True: seen) as an additive one [B, 1, Q, K]."""
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, None]
