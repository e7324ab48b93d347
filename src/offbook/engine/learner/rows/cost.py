"""The estimated cost of a layout, in floating-point operations. No torch.

What a kernel launch costs is measured once per card (`launch_cost`). The constants are fixed. They were measured once,
except FLEX_SLOWDOWN (from FlexAttention's paper), FLEX_CALLS and RUN_CALLS (counted kernel launches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offbook.engine.token_tree import Ints, Segments

from .attention_blocks import blocks
from .attention_pieces import Piece

AttentionName = Literal["flash_pieces", "flex", "runs"]
"""How attention on a tree is computed; `attention.choose` decides."""

LINEAR_PASSES = 4  # operations per frozen weight and token: 2 forward, 2 backward (input gradient only)
LORA_PASSES = 6  # operations per trained weight and token: 2 forward, 4 backward
ATTENTION_PASSES = 12  # per pair, head and channel: QK and PV forward, their four products backward
ROW_CALLS = 90  # kernel launches per layer and batch of rows, forward and backward
PIECE_CALLS = 60  # cost of an attention piece per layer in launches, including the inefficiency of small kernels
RUN_CALLS = (
    25  # launches per layer of one run by SDPA: two concatenations, a mask, attention, and their backward passes
)
FLEX_CALLS = 15  # launches per layer that padding and cutting add to a row, forward and backward
FLEX_SLOWDOWN = (
    1.15  # time per product against the flash attention of plain rows (2412.05496: 0.9 forward, 0.85 backward)
)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model and its device that costs depend on.

    Parameter counts: `linear` in frozen layers, `lora` in the adapter, `head` in the output layer. `call_flops`:
    operations that the device does while one kernel launches. `attention`: the device's attention for trees.
    `longest_row`: most tokens of one tree row that the model's tables of positions allow; None: any number.
    """

    layers: int
    heads: int
    head_dim: int
    linear: int
    lora: int
    head: int
    call_flops: float = 2e5
    attention: AttentionName = "flash_pieces"
    longest_row: int | None = None

    @property
    def token_flops(self) -> float:
        """Operations per token, forward and backward, without attention and logits."""
        return LINEAR_PASSES * self.linear + LORA_PASSES * self.lora

    @property
    def pair_flops(self) -> float:
        """Operations per query-key product in all layers, forward and backward."""
        return ATTENTION_PASSES * self.layers * self.heads * self.head_dim

    @property
    def row_flops(self) -> float:
        """Fixed cost of a batch of rows, in operations."""
        return self.layers * ROW_CALLS * self.call_flops

    @property
    def piece_pairs(self) -> float:
        """Query-key products that take as long as launching one attention piece."""
        return self.launch_pairs(PIECE_CALLS)

    def launch_pairs(self, calls: float) -> float:
        """Query-key products that take as long as `calls` kernel launches per layer."""
        return self.layers * calls * self.call_flops / self.pair_flops


def tree_pairs(shape: ModelShape, runs: Segments, pieces: Sequence[Piece], subtree_end: Ints) -> float:
    """The cost of attention on a tree row, in query-key products. Includes kernel launches beyond those in
    `row_flops`."""
    if shape.attention == "flex":
        return FLEX_SLOWDOWN * blocks(subtree_end).pairs + shape.launch_pairs(FLEX_CALLS)
    if shape.attention == "runs":
        own = runs.end - runs.start
        return float((own * (runs.depth + own)).sum()) + len(runs) * shape.launch_pairs(RUN_CALLS)
    return sum(piece.pairs for piece in pieces) + (len(pieces) - 1) * shape.piece_pairs


@dataclass(frozen=True)
class Estimate:
    """The cost of a layout. `tokens` and `flops` exclude padding; `flops` includes attention and logits. The planner
    minimises `cost`, which is flops with padding and kernel launches."""

    tokens: int
    flops: float
    cost: float
