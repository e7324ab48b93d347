"""Sampling settings, and what they do to logits [rows, vocabulary]: the sampler draws from the result, and the learner computes
logprobs in it.

The order is vLLM's: bias and penalties, temperature, min-p, top-k, top-p, log-softmax. No transformers, since benchmarks on bare
GPU machines need this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class RowSettings:
    """Settings of rows of logits, [rows]. None: every row has the setting's off value."""

    temperature: Tensor | None = None  # off: 1, also for greedy rows
    min_p: Tensor | None = None  # off: 0
    top_k: Tensor | None = None  # int64; off: 0
    top_p: Tensor | None = None  # off: 1

    def since(self, first: int) -> RowSettings:
        """Those of the rows from `first` on."""
        return RowSettings(
            *(part if part is None else part[first:] for part in (self.temperature, self.min_p, self.top_k, self.top_p))
        )


@dataclass(frozen=True)
class TargetSettings:
    """The sampled token of every target of a step, and the sampling settings of its call; arrays [N].

    top_p 1, top_k 0 and min_p 0 mean off. A target at temperature 0 is never in the kept set. `allowed[i]` is the index
    in `allowed_ids` of the token ids that a grammar allowed there, -1 for all; None: all targets are free.
    """

    token_ids: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]
    allowed: NDArray[np.int64] | None = None
    allowed_ids: tuple[NDArray[np.int64], ...] = ()

    def take(self, index: NDArray[np.int64]) -> TargetSettings:
        """The targets at these indexes."""
        return replace(
            self,
            token_ids=self.token_ids[index],
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            allowed=None if self.allowed is None else self.allowed[index],
        )

    def keys(self, predictors: NDArray[np.int64]) -> NDArray[np.int64]:
        """One column per target, int64 [6 or 7, N]. Equal columns have equal logprobs; floats are compared by their
        bits."""
        reals = (values.view(np.int64) for values in (self.temperature, self.top_p, self.min_p))
        grammar = () if self.allowed is None else (self.allowed,)
        return np.stack([predictors, self.token_ids, self.top_k, *reals, *grammar])


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


def excluded(logits: Tensor, settings: RowSettings) -> Tensor | None:
    """Which tokens, bool [rows, V], are excluded from logits after temperature; None where no setting is on.

    Each filter after the one before it: min-p; top-k, ties kept; top-p, the nucleus (1904.09751). The likeliest token is
    always kept.
    """
    min_p, top_k, top_p = settings.min_p, settings.top_k, settings.top_p
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


def processed_logprobs(logits: Tensor, settings: RowSettings) -> Tensor:
    """Logprobs [rows, V] of the distribution from which tokens are sampled."""
    if settings.temperature is not None:
        logits = logits / settings.temperature[:, None]
    outside = excluded(logits, settings)
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
