"""What a layout costs, in floating-point operations. No torch.

Constants were measured once and are fixed, not timed at start-up: the planner's choice must be the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

LINEAR_PASSES = 4  # frozen weights: 2 operations per weight forward, 2 backward (input only)
LORA_PASSES = 6  # trained weights: 2 forward, 4 backward
ATTENTION_PASSES = 12  # per pair, head and channel: QK and PV forward, their four products backward
ROW_CALLS = 90  # kernels per layer and row batch, forward and backward
PIECE_CALLS = 60  # launches that one attention piece costs per layer, small kernels' slowness included


@dataclass(frozen=True)
class ModelShape:
    """What cost depends on. Parameters are counted per token: `linear` frozen layers, `lora` adapters, `head` logits.

    `call_flops`: operations that the device does in the time one kernel call takes to launch.
    """

    layers: int
    heads: int
    head_dim: int
    linear: int
    lora: int
    head: int
    call_flops: float = 2e5

    @property
    def token_flops(self) -> float:
        """Forward and backward of one token, without attention and logits."""
        return LINEAR_PASSES * self.linear + LORA_PASSES * self.lora

    @property
    def pair_flops(self) -> float:
        """Forward and backward of one query-key product in all layers."""
        return ATTENTION_PASSES * self.layers * self.heads * self.head_dim

    @property
    def row_flops(self) -> float:
        """The fixed cost of one more batch of rows."""
        return self.layers * ROW_CALLS * self.call_flops

    @property
    def piece_pairs(self) -> float:
        """Query-key products that take as long as launching one attention piece."""
        return self.layers * PIECE_CALLS * self.call_flops / self.pair_flops


@dataclass(frozen=True)
class Estimate:
    """`tokens` and `flops` count useful work (no padding, attention and logits included); `cost` is what the planner
    compares: flops with padding and launches."""

    tokens: int
    flops: float
    cost: float
