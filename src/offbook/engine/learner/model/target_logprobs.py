"""Logprobs of sampled tokens under their calls' sampling settings.

The settings apply in the order of vLLM's `processed_logprobs`: grammar, temperature, min-p, top-k, top-p, then log-softmax.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch's autograd functions carry no types.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offbook.engine.sampling import RowSettings, TargetSettings, excluded

Head = Callable[[Tensor], Tensor]


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits under a soft cap, cap * tanh(logits / cap) (Gemma 2, 2408.00118, section 2); unchanged without one."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class _ChunkSettings:
    """Settings of n targets as tensors [n]."""

    token_ids: Tensor
    filters: RowSettings
    sampled: Tensor  # bool: temperature above 0
    allowed: tuple[Tensor, Tensor, Tensor] | None  # bool [n]: under a grammar; target and token of each that it allows


def target_logprobs(
    hidden: Tensor,
    predictors: NDArray[np.int64],
    settings: TargetSettings,
    target_numbers: NDArray[np.int64],
    head: Head,
    *,
    chunk: int,
    head_trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, entropy (nats, detached) and kept (bool) of a row's n targets, each [n].

    hidden: last hidden states [T, H]; hidden[predictors[i]] predicts target i, whose number in `settings` is
    target_numbers[i]; n may be 0. Equal targets are computed once. Only the logits of `chunk` targets are in memory at a time, in both
    passes. `head_trains`: the head has trained weights, so the backward pass recomputes the logits.
    """
    row_settings = settings.take(target_numbers)
    first, inverse = _distinct(row_settings.keys(predictors))
    positions = torch.from_numpy(predictors[first]).to(hidden.device)
    chunks = [
        _chunk_settings(row_settings.take(first[i : i + chunk]), hidden) for i in range(0, max(len(first), 1), chunk)
    ]
    places = positions.split(chunk)
    if head_trains or not torch.is_grad_enabled():
        parts = [
            _with_autograd(hidden, place, chunk_settings, head)
            for place, chunk_settings in zip(places, chunks, strict=True)
        ]
        logprobs, entropy, kept = (torch.cat(column) for column in zip(*parts, strict=True))
    else:
        logprobs, entropy, kept = _FrozenHead.apply(hidden, places, chunks, head)
    index = torch.from_numpy(inverse).to(hidden.device)
    return logprobs[index], entropy[index], kept[index]


def _distinct(table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct columns: indexes of their first occurrence, ascending, and for every column its number among
    them."""
    _, first, inverse = np.unique(table, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


def _chunk_settings(settings: TargetSettings, like: Tensor) -> _ChunkSettings:
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32

    def tensor(values: NDArray[Any], off: NDArray[np.bool_], dtype: torch.dtype = exact) -> Tensor | None:
        return None if off.all() else torch.from_numpy(values).to(like.device, dtype)

    greedy = settings.temperature <= 0
    return _ChunkSettings(
        token_ids=torch.from_numpy(settings.token_ids).to(like.device),
        filters=RowSettings(
            temperature=tensor(np.where(greedy, 1.0, settings.temperature), greedy | (settings.temperature == 1.0)),
            min_p=tensor(settings.min_p, settings.min_p <= 0.0),
            top_k=tensor(settings.top_k, settings.top_k <= 0, torch.int64),
            top_p=tensor(settings.top_p, settings.top_p >= 1.0),
        ),
        sampled=torch.from_numpy(~greedy).to(like.device),
        allowed=_allowed(settings, like.device),
    )


def _allowed(settings: TargetSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    if settings.allowed is None or not (constrained := settings.allowed >= 0).any():
        return None
    rows = np.flatnonzero(constrained)
    ids = [settings.allowed_ids[place] for place in settings.allowed[rows]]
    targets = np.repeat(rows, [len(tokens) for tokens in ids])
    flags, places, tokens = (
        torch.from_numpy(array).to(device) for array in (constrained, targets, np.concatenate(ids))
    )
    return flags, places, tokens


def _with_autograd(hidden: Tensor, place: Tensor, chunk: _ChunkSettings, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and kept of a chunk. The backward pass recomputes the logits."""

    def run(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _chunk_logprobs(head(states), chunk)

    states = hidden[place]
    if not torch.is_grad_enabled():
        return run(states)
    result: tuple[Tensor, Tensor, Tensor] = checkpoint(run, states, use_reentrant=False)
    return result


def _chunk_logprobs(logits: Tensor, chunk: _ChunkSettings) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] -> logprobs, entropy, kept [n]. A token outside the kept set gets logprob 0 and no gradient."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if chunk.filters.temperature is not None:
        logits = logits / chunk.filters.temperature[:, None]
    kept = chunk.sampled
    outside = None
    if chunk.allowed is not None:
        constrained, targets, tokens = chunk.allowed
        outside = constrained[:, None].repeat(1, logits.shape[-1])
        outside[targets, tokens] = False
        logits = logits.masked_fill(outside, float("-inf"))
    filtered = excluded(logits.detach(), chunk.filters)
    if filtered is not None:
        outside = filtered if outside is None else outside | filtered
    if outside is not None:
        logits = logits.masked_fill(outside, float("-inf"))
        kept = kept & ~outside.gather(1, chunk.token_ids[:, None])[:, 0]
    logprobs = logits.log_softmax(-1)
    detached = logprobs.detach()
    finite = detached if outside is None else detached.masked_fill(detached == float("-inf"), 0.0)
    entropy = -(detached.exp() * finite).sum(-1)
    chosen = logprobs.gather(1, chunk.token_ids[:, None])[:, 0]
    return torch.where(kept, chosen, torch.zeros_like(chosen)), entropy, kept


class _FrozenHead(torch.autograd.Function):
    """Logprobs of a frozen head, whose logits are computed once and never stored.

    A target's logprob depends on one hidden state only. The forward pass stores d logprob / d hidden, [n, H]; the
    backward pass multiplies it by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, places: tuple[Tensor, ...], chunks: list[_ChunkSettings], head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        slopes: list[Tensor] = []
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for place, chunk in zip(places, chunks, strict=True):
            with torch.enable_grad():
                states = hidden[place].detach().requires_grad_()
                logprobs, entropy, kept = _chunk_logprobs(head(states), chunk)
                slopes.append(torch.autograd.grad(logprobs.sum(), states)[0])
            columns.append((logprobs.detach(), entropy.detach(), kept))
        ctx.save_for_backward(torch.cat(slopes), torch.cat(places))
        ctx.shape = hidden.shape
        logprobs, entropy, kept = (torch.cat(column) for column in zip(*columns, strict=True))
        ctx.mark_non_differentiable(entropy, kept)
        return logprobs, entropy, kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        slopes, places = ctx.saved_tensors
        grad = slopes.new_zeros(ctx.shape)
        grad.index_add_(0, places, (slopes * grads[0][:, None]).to(slopes.dtype))
        return grad, None, None, None
