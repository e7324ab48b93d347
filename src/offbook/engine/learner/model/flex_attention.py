"""Tree attention as one block-sparse kernel: torch's FlexAttention with the mask k <= q < subtree_end[k].

The kernel is compiled at its first call, again at the first other length (then for all lengths), and for both with and
without gradients. `trial` tests on the device that this works, before training uses it.
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

from offbook.engine.learner.rows.attention_blocks import (
    BLOCK,
    Bools,
    Nearness,
    blocks,
)
from offbook.engine.token_tree import Ints

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257)  # the kernel rejects less than 16; above 256 its tiles are too small to be fast
Attention = Callable[..., Tensor]
OLDEST = (8, 0)
"""Lowest CUDA compute capability. Older chips (T4) have no bfloat16, and a failed kernel build may kill the process."""
ALLOWED = 0.03
"""Largest relative error in the trial. bfloat16 rounding causes 0.01, a wrong mask more than 0.1."""


def block_mask(subtree_end: Ints, device: torch.device, near: Nearness | None = None) -> BlockMask:
    """FlexAttention's mask of a tree row, on `device`. `subtree_end`: int64 [T]; the mask is padded to whole blocks.
    `near`: the layer's sliding window."""
    layout = blocks(subtree_end, BLOCK, near)
    end = torch.from_numpy(layout.subtree_end).to(device, torch.int32)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    partial, full = _ordered(layout.partial), _ordered(layout.full)
    mask = seen if near is None else _within(near, seen, len(layout.subtree_end), device)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=layout.size, mask_mod=mask).to(device)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, H, T, D]. T must not exceed the mask's length."""
    tokens = query.shape[2]
    padding = int(mask.shape[-1]) - tokens
    if padding:
        query, key, value = (pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    return _compiled(query.device.type)(query, key, value, mask, repr(scale))[:, :, :tokens]


def unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlexAttention cannot work with this device, dtype and head size; None: try it."""
    if device.type != "cuda":
        return f"FlexAttention has no backward pass on {device.type}"
    if dtype not in DTYPES:
        return f"FlexAttention has no kernel for {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} channels are outside FlexAttention's {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        return f"compute capability {capability[0]}.{capability[1]} is below {OLDEST[0]}.{OLDEST[1]}"
    return None


def trial(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Compile the kernel, run it forward and backward on two small trees, and compare it with dense attention.

    Returns why FlexAttention must not be used, or None. Training reuses the compiled kernels.
    """
    try:
        errors = [_error(ends, device, dtype, (heads, kv_heads, head_dim)) for ends in _trees()]
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a driver raises: another attention takes over
        return f"FlexAttention does not run here: {type(error).__name__}: {str(error).strip()[:300]}"
    worst = max(errors)
    if worst <= ALLOWED:
        return None
    return f"FlexAttention is off by {worst:.2g} from dense attention here (allowed {ALLOWED:g})"


def _within(near: Nearness, seen: Attention, tokens: int, device: torch.device) -> Attention:
    """The mask `seen` of a row padded to `tokens`, without the ancestors beyond the window."""
    padded = np.concatenate([near.depth, np.zeros(tokens - len(near.depth), np.int64)])
    depth = torch.from_numpy(padded).to(device, torch.int32)
    reach = depth + near.window  # a tensor, so that layers with different windows share one compiled kernel

    def seen_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(batch, head, query, key) & (depth[query] < reach[key])

    return seen_near


@cache
def _compiled(device: str) -> Attention:
    # fullgraph: an error is better than FlexAttention's eager mode, which materialises all scores. Inductor has no
    # backward pass on CPU, so tests there run the same graph uncompiled.
    return torch.compile(_kernel, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: str) -> Tensor:
    # The kernel needs a constant scale. dynamo turns a float that varies between calls into a graph input, but a string
    # is always a constant.
    grouped = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, block_mask=mask, scale=float(scale), enable_gqa=grouped)


def _ordered(chosen: Bools) -> tuple[Tensor, Tensor]:
    """bool [n, n] in FlexAttention's format: per row the number of chosen columns, int32 [1, 1, n], and all column
    indexes, the chosen ones first, int32 [1, 1, n, n]."""
    counts = chosen.sum(1).astype(np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(order)[None, None]


def _trees() -> tuple[Ints, Ints]:
    """A prompt with two branches, and a longer one whose branch branches again. Two lengths trigger both
    compilations."""
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
        index, end = torch.arange(tokens, device=device), torch.from_numpy(ends).to(device)
        seen = (index[None] <= index[:, None]) & (index[:, None] < end[None])
        key, value = (states.repeat_interleave(heads // kv_heads, 1) for states in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)

    with torch.no_grad():
        flexible(query, key, value)  # without gradients the kernel is compiled separately
    actual = _results(flexible, grad, query, key, value)
    expected = _results(dense, grad.float(), query.float(), key.float(), value.float())
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


def _results(attention: Attention, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [state.detach().requires_grad_() for state in states]
        out = attention(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)
