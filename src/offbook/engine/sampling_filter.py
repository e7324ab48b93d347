"""The filter of min-p, top-k and top-p. What it leaves is the kept set of a call: the sampler draws from it, and the
learner computes logprobs in it. Pure."""

from __future__ import annotations

import torch
from torch import Tensor


def excluded(logits: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor | None:
    """Which tokens, bool [n, V], are excluded from logits [n, V] after temperature; None where no setting is on.

    In vLLM's order, each after the one before it: min-p; top-k, ties kept; top-p, the nucleus (1904.09751). min_p [n]
    (0 off), top_k int64 [n] (0 off), top_p [n] (1 off); None: off for every row. The likeliest token is always kept.
    """
    if min_p is None and top_k is None and top_p is None:
        return None
    outside = torch.zeros_like(logits, dtype=torch.bool)
    if min_p is not None:
        outside = logits < logits.amax(-1, keepdim=True) + min_p.log()[:, None]
    if top_k is None and top_p is None:
        return outside
    ordered, order = logits.masked_fill(outside, -torch.inf).sort(-1)
    vocabulary = logits.shape[-1]
    if top_k is not None:
        width = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
        threshold = ordered.gather(-1, (vocabulary - width)[:, None])
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    if top_p is not None:
        tail = ordered.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
        tail[:, -1] = False
        ordered = ordered.masked_fill(tail, -torch.inf)
    return torch.zeros_like(outside).scatter_(-1, order, ordered == -torch.inf)
