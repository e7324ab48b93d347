"""Samples one token per row from logits: pure functions of float32 [rows, vocabulary].

The order is vLLM's: bias and penalties, temperature, min-p, top-k, top-p, log-softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...sampling_filter import excluded


def penalised(
    logits: Tensor, prompt_seen: Tensor, counts: Tensor, repetition: float, frequency: float, presence: float
) -> Tensor:
    """Apply penalties to the logits [V] of one row. prompt_seen bool [V]: tokens of the prompt; counts [V]: times sampled.

    The repetition penalty (CTRL, 1909.05858, section 4.1) applies to tokens of prompt and completion, frequency and
    presence penalty (OpenAI's API) only to those of the completion.
    """
    seen = prompt_seen | (counts > 0)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - frequency * counts - presence * (counts > 0).to(logits.dtype)


def processed_logprobs(
    logits: Tensor, temperature: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """Logprobs [B, V] of the distribution from which tokens are sampled.

    temperature [B] is 1 for greedy rows. min_p [B]: 0 is off; top_k int64 [B]: 0 is off; top_p [B]: 1 is off. None turns a
    setting off for every row.
    """
    logits = logits / temperature[:, None]
    outside = excluded(logits, min_p, top_k, top_p)
    return torch.log_softmax(logits if outside is None else logits.masked_fill(outside, -torch.inf), -1)


def draw(logprobs: Tensor, uniforms: Tensor, greedy: Tensor | None) -> Tensor:
    """Sample one token per row [B] by inverse transform sampling with `uniforms` [B] in [0, 1), in their dtype.

    Rows with `greedy` (bool [B]; None: no row) get the most likely token. A token of probability 0 is never drawn.

    >>> logprobs = torch.log(torch.tensor([[0.2, 0.5, 0.3]] * 3))
    >>> draw(logprobs, torch.tensor([0.1, 0.6, 0.1]), torch.tensor([False, False, True])).tolist()
    [0, 1, 1]
    """
    cumulative = logprobs.to(uniforms.dtype, copy=True).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    targets = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)
    return tokens if greedy is None else torch.where(greedy, logprobs.argmax(-1), tokens)
