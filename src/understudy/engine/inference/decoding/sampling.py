"""From logits to one token per row: pure functions over [rows, vocabulary], in float32, in vLLM's order:
bias and penalties, temperature, min-p, top-k, top-p, log-softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kept_tokens import excluded


def penalised(
    logits: Tensor, prompt_seen: Tensor, counts: Tensor, repetition: float, frequency: float, presence: float
) -> Tensor:
    """One row's logits [V] after the penalties. prompt_seen bool [V]; counts [V]: how often each token was sampled.

    Repetition (1909.05858, section 4.1) sees prompt and completion; frequency and presence the completion only.
    """
    seen = prompt_seen | (counts > 0)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - frequency * counts - presence * (counts > 0).to(logits.dtype)


def processed_logprobs(
    logits: Tensor, temperature: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """Logprobs [B, V] of the distribution that is sampled from. temperature [B] (1 where greedy); min_p [B] (0 off);
    top_k int64 [B] (0 off); top_p [B] (1 off); None: off for every row."""
    logits = logits / temperature[:, None]
    outside = excluded(logits, min_p, top_k, top_p)
    return torch.log_softmax(logits if outside is None else logits.masked_fill(outside, -torch.inf), -1)


def draw(logprobs: Tensor, uniforms: Tensor, greedy: Tensor | None) -> Tensor:
    """One token per row [B] by inverting the cumulative distribution at `uniforms` [B] in [0, 1), in their dtype;
    the likeliest where `greedy` (bool [B]; None: nowhere). A token of probability 0 is never drawn."""
    cumulative = logprobs.to(uniforms.dtype, copy=True).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    at = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, at, right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)
    return tokens if greedy is None else torch.where(greedy, logprobs.argmax(-1), tokens)
