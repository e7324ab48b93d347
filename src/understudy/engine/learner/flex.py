"""Tree attention as one block-sparse kernel: torch's FlexAttention with the mask k <= q < subtree_end[k].

The kernel is compiled for the device at the first call, once for a first length and once for every other, with and
without gradients. `refused` asks the device itself whether that works, and is asked before anything relies on it.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# torch's own annotations are partial

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from ..token_tree import Ints
from .blocks import Bools, blocks

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257)  # below 16 the kernel refuses, above 256 its tiles are too small to be worth it
Attention = Callable[..., Tensor]
OLDEST = (8, 0)
"""CUDA compute capability. Older chips (T4) have no bfloat16, and a kernel that they cannot build may end the process."""
ALLOWED = 0.03
"""Largest relative error of the trial: bfloat16 rounding gives 0.01, a wrong mask more than 0.1."""


def block_mask(subtree_end: Ints, device: torch.device) -> BlockMask:
    """The mask of a tree row of T tokens, padded to whole blocks; its index arrays and its token array on `device`."""
    made = blocks(subtree_end)
    end = torch.from_numpy(made.subtree_end).to(device, torch.int32)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    mask = BlockMask.from_kv_blocks(*_ordered(made.partial), *_ordered(made.full), BLOCK_SIZE=made.size, mask_mod=seen)
    return mask.to(device)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """query [1, H, T, D], key and value [1, Hkv, T, D], T at most the mask's -> [1, H, T, D]."""
    tokens = query.shape[2]
    more = int(mask.shape[-1]) - tokens
    if more:
        query, key, value = (pad(states, (0, 0, 0, more)) for states in (query, key, value))
    return _compiled(query.device.type)(query, key, value, mask, repr(scale))[:, :, :tokens]


def unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlexAttention is not tried, as far as device, dtype and head size say; None when it is."""
    if device.type != "cuda":
        return f"FlexAttention has no backward pass on {device.type}"
    if dtype not in DTYPES:
        return f"FlexAttention has no kernel for {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} channels are outside FlexAttention's {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < OLDEST:
        return f"compute capability {found[0]}.{found[1]} is below {OLDEST[0]}.{OLDEST[1]}"
    return None


def trial(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Compile the kernel, run it forward and backward on two small trees and compare with dense attention.

    Returns why it must not be used, or None. What it compiles is what training uses.
    """
    try:
        errors = [_error(ends, device, dtype, (heads, kv_heads, head_dim)) for ends in _trees()]
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a driver raises: another attention takes over
        return f"FlexAttention does not run here: {type(error).__name__}: {str(error).strip()[:300]}"
    worst = max(errors)
    if worst <= ALLOWED:
        return None
    return f"FlexAttention is off by {worst:.2g} from dense attention here (allowed {ALLOWED:g})"


@cache
def _compiled(device: str) -> Attention:
    # fullgraph: rather an error than FlexAttention's eager form, which makes all scores at once. Inductor has no backward
    # pass for a CPU, where tests run the same graph uncompiled.
    return torch.compile(_kernel, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: str) -> Tensor:
    # A float that is not the same at every call becomes an input of the graph, and the kernel needs a constant; a string
    # always is one.
    grouped = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, block_mask=mask, scale=float(scale), enable_gqa=grouped)


def _ordered(chosen: Bools) -> tuple[Tensor, Tensor]:
    """bool [n, n] as FlexAttention has it: how many of each row, and which, the others behind them; int32 [1, 1, n(, n)]."""
    counts = chosen.sum(1).astype(np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(order)[None, None]


def _trees() -> tuple[Ints, Ints]:
    """Two lengths, so that both compilations happen: a prompt with two branches, and one of them branching again."""
    small, large = np.full(200, 200), np.full(600, 600)
    small[50:140] = 140
    large[130:400] = 400
    large[200:290] = 290
    return small, large


def _error(ends: Ints, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> float:
    """The largest relative error (2-norm) of the output and the three gradients."""
    heads, kv_heads, width = sizes
    tokens = len(ends)
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    query, key, value, grad = (torch.randn(1, n, tokens, width, generator=draw).to(device, dtype) for n in shapes)
    scale = width**-0.5
    mask = block_mask(ends, device)

    def flexible(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, mask, scale)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at, end = torch.arange(tokens, device=device), torch.from_numpy(ends).to(device)
        seen = (at[None] <= at[:, None]) & (at[:, None] < end[None])
        key, value = (states.repeat_interleave(heads // kv_heads, 1) for states in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)

    with torch.no_grad():
        flexible(query, key, value)  # compiled by itself
    found = _answers(flexible, grad, query, key, value)
    expected = _answers(dense, grad.float(), query.float(), key.float(), value.float())
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _answers(attention: Attention, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [state.detach().requires_grad_() for state in states]
        out = attention(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)
