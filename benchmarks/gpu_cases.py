"""What benchmarks/gpu.py measures: models, groups of rollouts, and the ways to compute their gradient."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
if importlib.util.find_spec("pydantic") is None:  # the learner's core takes one type alias from the options, no more
    sys.modules["offbook.base.config"] = SimpleNamespace(LayoutName=str)  # type: ignore[assignment]

from offbook.engine.learner.rows.layouts import Chosen

DENSE = "benchmark_dense"


@dataclass(frozen=True)
class Row:
    """What the token tree reads of an `engine.protocol.Sample`, which needs pydantic."""

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    offset: int

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class Shape:
    """A Qwen2 of random weights."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool
    checkpointing: bool = False
    exact: bool = False  # float32, one repeat: the gradients are what is looked at

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )


@dataclass(frozen=True)
class Group:
    """`size` rollouts of one prompt; each of `turns` turns samples `sampled` tokens, `tool` tokens come between."""

    name: str
    prompt: int
    sampled: int
    size: int
    turns: int = 1
    tool: int = 0

    def rows(self, vocabulary: int) -> list[Row]:
        """One row per call, of random tokens."""
        draw = np.random.default_rng(0)

        def ids(count: int) -> np.ndarray:
            return draw.integers(0, vocabulary, count).astype(np.int32)

        start, rows, offset = ids(self.prompt), [], 0
        for _ in range(self.size):
            context = start
            for _ in range(self.turns):
                completion = ids(self.sampled)
                rows.append(Row(context, completion, offset))
                offset += len(completion)
                context = np.concatenate([context, completion, ids(self.tool)])
        return rows


SHAPES = {
    "check": Shape("check: 2 layers of 0.5B, float32", 8192, 896, 2, 4864, 14, 2, True, exact=True),
    "0.5B": Shape("Qwen2.5-0.5B", 151_936, 896, 24, 4864, 14, 2, True),
    "7B": Shape("Qwen2.5-7B", 152_064, 3584, 28, 18_944, 28, 4, False, checkpointing=True),
    "micro": Shape("micro", 64, 64, 2, 96, 4, 2, True, checkpointing=True),
}
GROUPS = (
    Group("1000 + 300 x 8", 1000, 300, 8),
    Group("six-turn agent x 8", 1000, 60, 8, turns=6, tool=120),
)
SMALL = (Group("40 + 12 x 4", 40, 12, 4), Group("three-turn agent x 3", 30, 5, 3, turns=3, tool=4))


@dataclass(frozen=True)
class Way:
    """One way to compute the same gradient. `attention` None: SDPA, causal."""

    name: str
    layout: Chosen
    attention: str | None = None


REFERENCE = Way("call rows", "call_rows")
PLAIN = (REFERENCE, Way("leaf rows", "leaf_rows"))
TREES = (Way("tree, dense mask", "tree", DENSE), Way("tree, segments", "tree", "runs"))
WAYS = {
    "cpu": (*PLAIN, Way("tree, flash pieces", "tree", "flash_pieces"), *TREES),
    "cuda": (*PLAIN, Way("tree, FlexAttention", "tree", "flex"), *TREES),
}
