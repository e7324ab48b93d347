"""Loss scaling for a float16 base (Micikevicius et al. 1710.03740, section 3.2).

Gradients inside the base are float16, whose magnitudes range from 6e-8 to 65504. The loss is multiplied by a scale
before the backward pass, and the adapter's float32 gradients are divided by it afterwards."""

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
    """The current scale. `clean`: updates since it last changed. Both are saved in checkpoints."""

    value: float = FIRST
    clean: int = 0

    def divide(self, gradients: Sequence[Tensor]) -> bool:
        """Divide the gradients by the scale, in place. Returns whether all are finite."""
        for gradient in gradients:
            gradient.div_(self.value)
        return not gradients or bool(torch.stack([gradient.abs().sum() for gradient in gradients]).isfinite().all())

    def lower(self) -> bool:
        """Lower the scale after an overflow. Returns False if it is already at its minimum."""
        if self.value <= LOWEST:
            return False
        self.value, self.clean = max(LOWEST, self.value * LOWER), 0
        return True

    def applied(self) -> None:
        """Count an update without an overflow, and raise the scale after `PATIENCE` of them."""
        self.clean += 1
        if self.clean >= PATIENCE and self.value < HIGHEST:
            self.value, self.clean = self.value * GROW, 0
