"""The memory of sampler and learner on a GPU, part by part, in bytes.

Counted parts follow from the base's shape. Assumed parts are constants of this file, which no GPU has confirmed."""

from __future__ import annotations

from dataclasses import dataclass

from offbook.base.config import TrainConfig
from offbook.base.server_options import EngineOptions

from .base_shape import BaseShape
from .card import GIB, Card

CONTEXT = GIB // 2
"""Assumed: CUDA's context and libraries of one process."""
RESERVE = GIB // 2
"""Assumed: fragmentation in the allocators, and memory that nvidia-smi does not show."""
CUDA_GRAPHS = GIB
"""Assumed: vLLM's captured CUDA graphs, with and without LoRA."""
CALL_TOKENS = 2048
"""Tokens of key-value cache to reserve per call, for prompt and completion."""
LEAST_CALLS = 8
"""Number of calls whose cache must fit where `--max-batch` is not set."""
LOGIT_BYTES = 25
"""Counted on torch's meta device: bytes per logit that are allocated at the peak of `target_logprobs`, with top-k and
top-p."""
SAMPLED_LOGIT_BYTES = 26
"""Counted in the source of vLLM 0.32's sampler, per logit: logits in 16 bits and fp32, log-softmax, softmax, and a sort
with its indices."""
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in NF4 with double quantization: half a byte, one byte per block of 64, one float per 256 blocks
(QLoRA 2305.14314, section 3)."""
GATHERED_LAYERS = 3
"""Assumed: layers of a sharded base that are whole at once. One is computed, FSDP2 gathers the next, and frees the one before
when that has arrived."""
_OPTIMIZER_BYTES = 8  # AdamW's two moments in fp32
_GRADIENT_BYTES = 4
_ADAPTER_BYTES = 4  # PEFT holds the LoRA of a 16-bit base in fp32


@dataclass(frozen=True)
class Workload:
    """The options that memory depends on. `rank` is the largest LoRA rank to serve; `bytes_per_value` is of the base's
    precision."""

    row_tokens: int = TrainConfig().row_tokens
    logits_chunk: int = TrainConfig().logits_chunk
    rank: int = 16
    max_loras: int = 3
    max_batch: int | None = None
    max_model_len: int | None = None
    four_bit: bool = False
    bytes_per_value: int = 2

    @classmethod
    def of(cls, options: EngineOptions, row_tokens: int | None = None) -> Workload:
        """The workload of a server with these options."""
        return cls(
            row_tokens=row_tokens or TrainConfig().row_tokens,
            rank=options.max_lora_rank,
            max_loras=options.max_loras,
            max_batch=options.max_batch,
            max_model_len=options.max_model_len,
            four_bit=options.load_in_4bit,
            bytes_per_value=4 if options.dtype == "float32" else 2,
        )

    def longest(self, shape: BaseShape) -> int:
        """Tokens of the longest call."""
        return min(self.max_model_len or shape.positions, shape.positions)


@dataclass(frozen=True)
class Parts:
    """Bytes per part. `cache` is the smallest that the options require; activations are those of rows of
    `row_tokens`."""

    sampler_weights: int
    sampler_adapters: int
    sampler_activations: int
    cuda_graphs: int
    cache: int
    learner_weights: int
    learner_adapter: int
    learner_optimizer: int
    learner_gradients: int
    learner_activations: int
    contexts: int

    @property
    def learner_state(self) -> int:
        """Bytes that the learner holds between steps."""
        return self.learner_weights + self.learner_adapter + self.learner_optimizer


def parts(shape: BaseShape, card: Card, work: Workload, row_tokens: int) -> Parts:
    """The parts for rows of `row_tokens` tokens."""
    lora = shape.lora_parameters(work.rank)
    return Parts(
        sampler_weights=shape.parameters * work.bytes_per_value,
        sampler_adapters=work.max_loras * shape.slot_parameters(work.rank) * work.bytes_per_value,
        sampler_activations=sampler_activations(shape, card, work),
        cuda_graphs=CUDA_GRAPHS,
        cache=cache(shape, work),
        learner_weights=learner_weights(shape, work),
        learner_adapter=lora * _ADAPTER_BYTES,
        learner_optimizer=lora * _OPTIMIZER_BYTES,
        learner_gradients=lora * _GRADIENT_BYTES,
        learner_activations=learner_activations(shape, work, row_tokens),
        contexts=2 * CONTEXT + RESERVE,
    )


def cache_per_token(shape: BaseShape, work: Workload) -> int:
    """Bytes of key-value cache per token."""
    return shape.cache_values() * work.bytes_per_value


def cache(shape: BaseShape, work: Workload) -> int:
    """Bytes of the smallest key-value cache: for `--max-batch` calls of CALL_TOKENS, and at least for one call of
    `--max-model-len` if that is set."""
    calls = work.max_batch or LEAST_CALLS
    tokens = calls * min(CALL_TOKENS, work.longest(shape))
    if work.max_model_len is not None:
        tokens = max(tokens, work.longest(shape))
    return tokens * cache_per_token(shape, work)


def sampler_activations(shape: BaseShape, card: Card, work: Workload) -> int:
    """Bytes of one prefill of vLLM's default size, or of sampling from the logits of all calls, whichever is more."""
    values = 4 * shape.intermediate + 6 * shape.hidden + 2 * shape.q_width
    prefill = card.prefill_tokens * values * work.bytes_per_value
    return max(prefill, (work.max_batch or card.decoded_calls) * shape.vocabulary * SAMPLED_LOGIT_BYTES)


def learner_weights(shape: BaseShape, work: Workload) -> int:
    """Bytes of the frozen base, with its linear layers in 4 bits if the options say so."""
    if not work.four_bit:
        return shape.parameters * work.bytes_per_value
    return round(shape.linear_parameters * FOUR_BIT) + shape.other_parameters * work.bytes_per_value


def sharded_weights(shape: BaseShape, work: Workload, learners: int) -> int:
    """Bytes of the base on each of `learners` that shard its layers: its part, and what is whole in a pass."""
    inside = shape.parameters - shape.outer_parameters
    gathered = GATHERED_LAYERS * inside // shape.layers
    return (shape.outer_parameters + -(-inside // learners) + gathered) * work.bytes_per_value


def layer_bytes(shape: BaseShape, rank: int, bytes_per_value: int = 2, *, four_bit: bool = False) -> int:
    """Bytes per token that one layer with LoRA keeps for its backward pass.

    In 16 bits each input of the linear layers is kept once; that of `o_proj` is the attention's output
    (`LoraLinear`). With a base in 4 bits, PEFT computes the LoRA in fp32, so the inputs of the seven linear
    layers are kept in 4 bytes each."""
    h, q, kv, i, b = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate, bytes_per_value
    inputs = 4 * (5 * h + q + i) + 7 * 4 * rank if four_bit else b * (2 * h + i) + 7 * b * rank
    attention = b * (2 * q + 2 * kv) + 4 * shape.heads
    norms = 2 * 4 * (h + 1)
    if shape.family == "qwen3":
        norms += 4 * (q + kv + shape.heads + shape.kv_heads)
    return inputs + attention + norms + 3 * b * i


def learner_activations(shape: BaseShape, work: Workload, row_tokens: int, *, recompute: bool = True) -> int:
    """Peak bytes of one row. With activation recomputation: the inputs of all layers, and the larger of one layer's
    backward pass and the logits. Without it: what all layers keep, and the larger of a layer's temporaries and the
    logits."""
    b = work.bytes_per_value
    kept = layer_bytes(shape, work.rank, b, four_bit=work.four_bit)
    passing = 2 * b * shape.intermediate + (1 + 2 * b) * shape.hidden
    if work.four_bit:
        passing += 2 * shape.intermediate + 4 * shape.hidden
    inputs = row_tokens * shape.layers * (shape.hidden * b if recompute else kept)
    backward = row_tokens * (kept + passing if recompute else passing)
    logits = work.logits_chunk * shape.vocabulary * LOGIT_BYTES
    unpacked = max(inputs * outputs for inputs, outputs in shape.linears) * b if work.four_bit else 0
    return inputs + unpacked + max(backward, logits)
