"""A random adapter that moves the base's logprobs, by which the server sees at start that the sampler applies adapters as
the learner does."""

# pyright: reportUnknownMemberType=false
# torch's own annotations are partial

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offbook.base.config import LoraOptions
from offbook.base.errors import EngineError

from .mask_probe import completion_logprobs
from .policy import Policy

PROBE_LORA = LoraOptions(r=4, alpha=12.0)
"""All linear layers. alpha / r and alpha / sqrt(r) differ, so a wrong scale shows."""
MOVEMENT = (0.5, 2.0)
"""Range of the mean change of a token's logprob, in nats: far more than rounding in 16 bits, and far from saturation."""
TRIALS = 16


def probe_logprobs(
    policy: Policy, folder: Path, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> Tensor:
    """The logprobs of a completion's C tokens under the adapter in `folder`, nats, float64 [C] on the CPU. If there is no
    such folder, the adapter is written first: B random and scaled until these logprobs move by MOVEMENT.

    The policy's own adapter is lost. Raises EngineError if no scale moves them so, ConfigError, OSError."""
    if policy.lora != PROBE_LORA:
        policy.reset_adapter(PROBE_LORA)
    if folder.is_dir():
        policy.load_adapter(folder)
        return completion_logprobs(policy, prompt, completion, temperature)
    values = _scaled(policy, prompt, completion, temperature)
    policy.save_adapter(folder)
    return values


def _scaled(policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """Fill B, and return the completion's logprobs with it."""
    base = completion_logprobs(policy, prompt, completion, temperature, adapter=False)
    generator = torch.Generator().manual_seed(0)
    ups = [value for name, value in policy.trainable_parameters().items() if ".lora_B." in name]
    directions = [torch.randn(value.shape, generator=generator) for value in ups]
    least, most = MOVEMENT
    scale, low, high = 0.02, 0.0, float("inf")
    for _ in range(TRIALS):
        with torch.no_grad():
            for value, direction in zip(ups, directions, strict=True):
                value.copy_(direction * scale)
        values = completion_logprobs(policy, prompt, completion, temperature)
        moved = float((values - base).abs().mean())
        if least <= moved <= most:
            return values
        if moved < least:
            low, scale = scale, scale * 4 if high == float("inf") else (scale * high) ** 0.5
        else:  # also NaN, of a float16 base that overflows
            high, scale = scale, (low * scale) ** 0.5 if low else scale / 4
    raise EngineError(f"no random adapter was found that moves the logprobs by {least:g} to {most:g} nats")
