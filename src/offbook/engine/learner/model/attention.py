"""Attention on a token tree, registered with transformers under `NAME` and `WINDOWED`. Rows without a tree take torch's
SDPA. In layers with a sliding window a token sees those of its ancestors that are nearer than the window.

flash_pieces  On CPU: one call of torch's flash kernel per piece of `rows/cost.py`. The parts of a query's softmax are
merged by their log-sum-exp. With the merged output and log-sum-exp as inputs, the kernel's backward pass computes the
exact gradient of every part (as in ring attention, 2310.01889).
flex          On CUDA: one block-sparse kernel: torch's FlexAttention with the mask k <= q < subtree_end[k]. It is compiled at its
first call, again at the first other length (then for all lengths), and for both with and without gradients. `flex_trial` tests on
the device that this works, before training uses it.
runs          Elsewhere, and where a window hides an ancestor: one call of SDPA per run, whose keys are its
concatenated ancestors and itself."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch's custom operators and autograd functions carry no types.

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from offbook.engine.base_model import UNSUPPORTED
from offbook.engine.learner.rows.cost import AttentionName, Bools, Kind, Piece, blocks
from offbook.engine.token_tree import Ints, Segments

NAME = "offbook_tree"
"""The attention implementation's name. It has no mask function, so transformers builds no mask for it."""
WINDOWED = "offbook_tree_windowed"
"""The name for models with sliding windows. transformers builds SDPA's masks for their plain rows."""
NAMES = (NAME, WINDOWED)
NO_MASK = torch.zeros(1, 1, 1, 1)
"""The mask that a tree row of a `WINDOWED` model is called with: transformers passes a mask of four dimensions on
unchanged, and so builds none."""

logger = logging.getLogger(__name__)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # returns the log-sum-exp
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Choice:
    """The attention for trees. `reason`: why it is not FlexAttention; None on CPU."""

    name: AttentionName
    reason: str | None = None


@cache
def choose(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Choice:
    """Choose the attention for trees; logged once. The choice does not depend on a row's length, so the mask probe
    tests the attention that training uses.

    On CUDA the first call compiles FlexAttention and compares it with dense attention, forward and backward.
    """
    if device.type == "cpu":
        return Choice("flash_pieces")
    reason = unfit_for_flex(device, dtype, head_dim) or flex_trial(device, dtype, heads, kv_heads, head_dim)
    if reason is None:
        return Choice("flex")
    logger.warning("Attention on trees runs segment by segment, not in one FlexAttention kernel: %s", reason)
    return Choice("runs", reason)


class TreeContext:
    """One tree row as tree attention needs it: runs, pieces and subtree ends [T]. Masks are built once per row.

    `attention` forces a kind, for comparisons. Only `flash_pieces` uses `pieces`. `calls` counts the layers that have
    computed attention on this row, those computed again in the backward pass included.
    """

    def __init__(
        self,
        segments: Segments,
        pieces: tuple[Piece, ...],
        subtree_end: Ints,
        attention: AttentionName | None = None,
    ) -> None:
        self.segments = segments
        self.pieces = pieces
        self.attention: AttentionName | None = attention
        self.calls = 0
        self._ends = subtree_end
        self._subtree_end = torch.from_numpy(subtree_end)
        self._flex_masks: dict[torch.device, BlockMask] = {}
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of every tree in the row."""
        roots = self.segments.parent < 0
        return (self.segments.subtree_end[roots] - self.segments.start[roots]).tolist()

    def cut_off(self, window: int | None) -> int | None:
        """The sliding window, in tokens, if it hides an ancestor from a token of this row; else None."""
        if window is None:
            return None
        deepest = int((self.segments.depth + self.segments.end - self.segments.start).max()) - 1
        return window if window <= deepest else None

    def flex_mask(self, device: torch.device) -> BlockMask:
        """FlexAttention's mask of the row."""
        if device not in self._flex_masks:
            self._flex_masks[device] = flex_block_mask(self._ends, device)
        return self._flex_masks[device]

    def block_mask(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The additive mask [1, 1, n, n] of tokens start..end-1 among themselves."""
        key = (start, end, dtype)
        if key not in self._masks:
            index = torch.arange(start, end)
            seen = (index[None] <= index[:, None]) & (index[:, None] < self._subtree_end[start:end][None])
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            self._masks[key] = mask[None, None]
        return self._masks[key]


def register() -> None:
    """Register `attn_implementation=NAME` and `WINDOWED` with transformers. May be called repeatedly."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionInterface.register(WINDOWED, tree_attention)
    AttentionMaskInterface.register(WINDOWED, sdpa_mask)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    offbook_tree: TreeContext | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # transformers' own protocol of attention functions
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D].

    With `offbook_tree`, B is 1 and the tree is the mask, within `sliding_window` tokens of depth; without it, this
    is SDPA. Raises ValueError for arguments that are not implemented: changed scores, and on a tree a mask or dropout."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"this model's attention takes {name}, which neither SDPA nor attention on a tree computes"
            )
    if offbook_tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if (attention_mask is not None and attention_mask.shape != NO_MASK.shape) or dropout:
        raise ValueError("tree attention takes no mask and no dropout: the tree is the mask")
    offbook_tree.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = offbook_tree.cut_off(sliding_window)
    name = offbook_tree.attention or _chosen(query, key, value)
    if name == "flex" and window is None:
        out = flex_attend(query, key, value, offbook_tree.flex_mask(query.device), scale)
        return out.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if name == "flash_pieces" and window is None:
        out = _TreeAttention.apply(query, key, value, offbook_tree, scale)
    else:
        out = by_runs(query, key, value, offbook_tree.segments, scale, window)
    return out.transpose(1, 2).contiguous(), None


def _chosen(query: Tensor, key: Tensor, value: Tensor) -> AttentionName:
    if query.shape[-1] != value.shape[-1]:
        return "runs"
    return choose(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1]).name


def by_runs(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    """The portable implementation: every run's queries attend to its concatenated ancestors and itself, within
    `window` tokens. Shapes as in `tree_attention`, but key and value have H heads, and the result is [1, H, T, D]."""
    lengths: list[int] = (segments.end - segments.start).tolist()
    queries, keys, values = query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2)
    parents: list[int] = segments.parent.tolist()
    outs: list[Tensor] = []
    for s, own in enumerate(lengths):
        chain = [s]
        while (above := parents[chain[0]]) >= 0:
            chain.insert(0, above)
        depth = int(segments.depth[s])
        seen = torch.ones(own, depth + own, dtype=torch.bool, device=query.device).tril_(depth)
        first = 0
        if window is not None:
            seen.triu_(depth - window + 1)
            first = max(0, depth - window + 1)  # no query of the run sees an earlier ancestor
        outs.append(
            scaled_dot_product_attention(
                queries[s],
                torch.cat([keys[i] for i in chain], 2)[:, :, first:],
                torch.cat([values[i] for i in chain], 2)[:, :, first:],
                attn_mask=seen[:, first:],
                scale=scale,
            )
        )
    return torch.cat(outs, 2)


class _TreeAttention(torch.autograd.Function):
    """flash_pieces: query, key, value [1, H, T, D] of one tree row, on CPU -> [1, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeContext, scale: float) -> Tensor:
        _, heads, tokens, width = query.shape
        out = query.new_empty(1, tokens, heads, width).transpose(1, 2)
        lse_type = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty(1, tokens, heads, dtype=lse_type).transpose(1, 2)
        exact = out if out.dtype == lse_type else out.to(lse_type)  # half precision accumulates in float32
        for piece in tree.pieces:
            part, part_lse = _flash(
                _cut(query, piece.query, piece.batch),
                _cut(key, piece.key, piece.batch),
                _cut(value, piece.key, piece.batch),
                attn_mask=_mask(tree, piece, query.dtype),
                is_causal=piece.kind is Kind.CAUSAL,
                scale=scale,
            )
            here = slice(*piece.query)
            if piece.kind is Kind.ABOVE:
                _merge(exact[:, :, here], lse[:, :, here], part, part_lse)
            else:
                _cut(exact, piece.query, piece.batch).copy_(part)
                _cut(lse, piece.query, piece.batch).copy_(part_lse)
        if exact is not out:
            out.copy_(exact)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0]
        grad_query, grad_key, grad_value = (_like(source) for source in (query, key, value))
        for piece in ctx.tree.pieces:
            parts = _flash_backward(
                _cut(grad, piece.query, piece.batch),
                _cut(query, piece.query, piece.batch),
                _cut(key, piece.key, piece.batch),
                _cut(value, piece.key, piece.batch),
                _cut(out, piece.query, piece.batch),
                _cut(lse, piece.query, piece.batch),
                0.0,
                piece.kind is Kind.CAUSAL,
                attn_mask=_mask(ctx.tree, piece, query.dtype),
                scale=ctx.scale,
            )
            places = ((grad_query, piece.query), (grad_key, piece.key), (grad_value, piece.key))
            for part, (whole, span) in zip(parts, places, strict=True):
                target = _cut(whole, span, piece.batch)
                target.add_(part) if piece.kind is Kind.ABOVE else target.copy_(part)
        return grad_query, grad_key, grad_value, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part of the softmax into `out` and `lse`, in place. The parts of `out` are weighted by exp(lse - total
    lse)."""
    weight = torch.sigmoid(part_lse - lse)  # exp(part_lse) / (exp(part_lse) + exp(lse))
    lse.copy_(torch.logaddexp(lse, part_lse))
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))


def _cut(whole: Tensor, span: tuple[int, int], batch: int) -> Tensor:
    """The tokens `span` of a tensor [1, H, T, ...] as a view [batch, H, n / batch, ...]."""
    piece = whole[:, :, span[0] : span[1]]
    if batch == 1:
        return piece
    return piece[0].unflatten(1, (batch, -1)).transpose(0, 1)


def _mask(tree: TreeContext, piece: Piece, dtype: torch.dtype) -> Tensor | None:
    return tree.block_mask(*piece.query, dtype) if piece.kind is Kind.BLOCK else None


def _like(source: Tensor) -> Tensor:
    """An empty tensor [1, H, T, D] with the memory layout [1, T, H, D], which the projections need."""
    _, heads, tokens, width = source.shape
    return source.new_empty(1, tokens, heads, width).transpose(1, 2)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257)  # the kernel rejects less than 16; above 256 its tiles are too small to be fast
Attention = Callable[..., Tensor]
MIN_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability. Older chips (T4) have no bfloat16, and a failed kernel build may kill the process."""
ALLOWED = 0.03
"""Largest relative error in the trial. bfloat16 rounding causes 0.01, a wrong mask more than 0.1."""


def flex_block_mask(subtree_end: Ints, device: torch.device) -> BlockMask:
    """FlexAttention's mask of a tree row, on `device`. `subtree_end`: int64 [T]; the mask is padded to whole blocks."""
    layout = blocks(subtree_end)
    end = torch.from_numpy(layout.subtree_end).to(device, torch.int32)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    partial, full = _ordered(layout.partial), _ordered(layout.full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=layout.size, mask_mod=seen).to(device)


def flex_attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, H, T, D]. T must not exceed the mask's length."""
    tokens = query.shape[2]
    padding = int(mask.shape[-1]) - tokens
    if padding:
        query, key, value = (pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    return _compiled(query.device.type)(query, key, value, mask, repr(scale))[:, :, :tokens]


def unfit_for_flex(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlexAttention cannot work with this device, dtype and head size; None: try it."""
    if device.type != "cuda":
        return f"FlexAttention has no backward pass on {device.type}"
    if dtype not in DTYPES:
        return f"FlexAttention has no kernel for {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} channels are outside FlexAttention's {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None


def flex_trial(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str | None:
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
    heads, kv_heads, width = sizes
    tokens = len(ends)
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    query, key, value, grad = (torch.randn(1, n, tokens, width, generator=draw).to(device, dtype) for n in shapes)
    scale = width**-0.5
    mask = flex_block_mask(ends, device)

    def flexible(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attend(query, key, value, mask, scale)

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
