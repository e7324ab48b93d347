"""What a layout costs, in floating-point operations. No torch.

Constants were measured once and are fixed, not timed at start-up: the planner's choice must be the same on every run.
FLEX_SLOWDOWN is FlexAttention's paper's; FLEX_CALLS and RUN_CALLS are counted launches, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..token_tree import Ints, Segments
from .blocks import blocks
from .pieces import Piece

AttentionName = Literal["flash_pieces", "flex", "runs"]
"""How attention on a tree is computed; `attention.choose` decides."""

LINEAR_PASSES = 4  # frozen weights: 2 operations per weight forward, 2 backward (input only)
LORA_PASSES = 6  # trained weights: 2 forward, 4 backward
ATTENTION_PASSES = 12  # per pair, head and channel: QK and PV forward, their four products backward
ROW_CALLS = 90  # kernels per layer and row batch, forward and backward
PIECE_CALLS = 60  # launches that one attention piece costs per layer, small kernels' slowness included
RUN_CALLS = (
    25  # launches per layer of one run by SDPA: two concatenations, a mask, attention, and their backward passes
)
FLEX_CALLS = 15  # launches per layer that padding and cutting add to a row, forward and backward
FLEX_SLOWDOWN = (
    1.15  # time per product against the flash attention of plain rows (2412.05496: 0.9 forward, 0.85 backward)
)


@dataclass(frozen=True)
class ModelShape:
    """What cost depends on. Parameters are counted per token: `linear` frozen layers, `lora` adapters, `head` logits.

    `call_flops`: operations that the device does in the time one kernel call takes to launch.
    `attention`: how this device attends to trees.
    """

    layers: int
    heads: int
    head_dim: int
    linear: int
    lora: int
    head: int
    call_flops: float = 2e5
    attention: AttentionName = "flash_pieces"

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
        return self.launch_pairs(PIECE_CALLS)

    def launch_pairs(self, calls: float) -> float:
        """Query-key products that take as long as so many launches in each layer."""
        return self.layers * calls * self.call_flops / self.pair_flops


def tree_pairs(shape: ModelShape, runs: Segments, pieces: Sequence[Piece], subtree_end: Ints) -> float:
    """What attention on a tree row costs, in query-key products, launches included; the row's own are in `row_flops`."""
    if shape.attention == "flex":
        return FLEX_SLOWDOWN * blocks(subtree_end).pairs + shape.launch_pairs(FLEX_CALLS)
    if shape.attention == "runs":
        own = runs.end - runs.start
        return float((own * (runs.depth + own)).sum()) + len(runs) * shape.launch_pairs(RUN_CALLS)
    return sum(piece.pairs for piece in pieces) + (len(pieces) - 1) * shape.piece_pairs


@dataclass(frozen=True)
class Estimate:
    """`tokens` and `flops` count useful work (no padding, attention and logits included); `cost` is what the planner
    compares: flops with padding and launches."""

    tokens: int
    flops: float
    cost: float
