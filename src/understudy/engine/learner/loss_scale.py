"""The loss scale of a float16 base. Gradients on their way through the base are float16, which ends at 6e-8 and at 65504:
the loss is multiplied, the adapter's float32 gradients divided again (Micikevicius et al. 1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
LOWER, GROW = 1 / 4, 2.0
PATIENCE = 50
"""Updates without an overflow after which a larger scale is tried."""


@dataclass
class LossScale:
    """`clean`: updates since the scale last changed. Both belong to a model's checkpoint."""

    value: float = FIRST
    clean: int = 0

    def divide(self, gradients: Sequence[Tensor]) -> bool:
        """Take the scale out of the gradients, in place; whether they are finite."""
        for gradient in gradients:
            gradient.div_(self.value)
        return not gradients or bool(torch.stack([gradient.abs().sum() for gradient in gradients]).isfinite().all())

    def lower(self) -> bool:
        """After an overflow; False when it is at its lowest already."""
        if self.value <= LOWEST:
            return False
        self.value, self.clean = max(LOWEST, self.value * LOWER), 0
        return True

    def applied(self) -> None:
        """After an update without an overflow."""
        self.clean += 1
        if self.clean >= PATIENCE and self.value < HIGHEST:
            self.value, self.clean = self.value * GROW, 0
