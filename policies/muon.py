"""Muon with matrices of equal shape batched. `torch.optim.Muon` orthogonalizes one matrix at a time, always in
bfloat16; this one uses bfloat16 only where the CPU multiplies it in hardware."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch carries partial types.

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (Jordan et al., Muon, 2024)."""
STEPS = 5
"""Number of Newton-Schulz iterations."""
MULTIPLIES_BFLOAT16 = any(torch.cpu.get_capabilities().get(unit) for unit in ("avx512_bf16", "amx_bf16"))
"""Whether this CPU multiplies bfloat16 matrices in hardware, about four times as fast as float32."""


def orthogonalized(matrices_N_R_C: torch.Tensor) -> torch.Tensor:
    """Each of the N matrices [R, C] with its singular values moved near 1. Same shape and dtype."""
    tall = matrices_N_R_C.shape[-2] > matrices_N_R_C.shape[-1]
    out = matrices_N_R_C.mT if tall else matrices_N_R_C
    out = out / out.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    out = out.bfloat16() if MULTIPLIES_BFLOAT16 else out
    first, second, third = COEFFICIENTS
    for _ in range(STEPS):
        gram = out @ out.mT
        out = torch.baddbmm(out, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), out, beta=first)
    return (out.mT if tall else out).to(matrices_N_R_C.dtype)


class Muon(torch.optim.Optimizer):
    """SGD with Nesterov momentum whose update is orthogonalized (Jordan et al., 2024).

    The learning rate is multiplied by sqrt(max(1, rows / columns)). Weight decay is decoupled. All parameters must be
    matrices."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's stub is too narrow
        """One update of all matrices that have a gradient. `closure` is ignored."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, alike in shapes.items():
                updates = torch.stack([self._update(parameter, group["momentum"]) for parameter in alike])
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(alike, orthogonalized(updates), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _update(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)
