"""The memory of sampler and learner, part by part, in bytes: of the base's shape, read from its config.json, of the GPU, by layout,
and of the host.

Counted parts follow from the base's shape. Assumed parts are constants of this file, which no GPU has confirmed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast, get_args

from offbook.base.config import TrainConfig
from offbook.base.devices import EXACT_MIB
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.local_bases import local_base
from offbook.base.server_options import EngineOptions, MemoryLayout
from offbook.base.types import Json

from .. import tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the architectures whose weights can be counted."""
_VLLM_ADAPTS_EMBEDDINGS = ("llama", "qwen3")
"""Families for which vLLM 0.32 also reserves LoRA slots for the embeddings and the head (`embedding_modules` of its
models)."""


class UnknownShapeError(ConfigError):
    """The base's architecture is not one of FAMILIES, or its config.json lacks a number."""


@dataclass(frozen=True)
class BaseShape:
    """A decoder with equal layers: attention with grouped keys and values, a gated MLP, RMS norms. `positions` is the
    longest context in tokens; `tied` means that the head shares the embeddings' weights."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def q_width(self) -> int:
        """Width of one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of one token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(input, output) widths of a layer's linear layers: q, k, v, o, gate, up, down."""
        h, q, kv, i = self.hidden, self.q_width, self.kv_width, self.intermediate
        return ((h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h))

    @property
    def linear_parameters(self) -> int:
        """Number of weights of all layers' linear layers, without biases. These are stored in 4 bits with
        `--load-in-4bit`."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def outer_parameters(self) -> int:
        """Number of weights outside the layers: embeddings, head and final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def other_parameters(self) -> int:
        """Number of weights of embeddings, head, norms and biases."""
        biases = (self.q_width + 2 * self.kv_width) * self.attention_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        return self.outer_parameters + self.layers * (norms + biases)

    @property
    def parameters(self) -> int:
        """Number of weights of the base."""
        return self.linear_parameters + self.other_parameters

    def lora_parameters(self, rank: int) -> int:
        """Number of weights of a LoRA on all linear layers except the head."""
        return rank * self.layers * sum(inputs + outputs for inputs, outputs in self.linears)

    def slot_parameters(self, rank: int) -> int:
        """Number of weights of one LoRA slot in vLLM. For some families it includes the embeddings and the head."""
        tables = 2 * rank * (self.vocabulary + self.hidden) if self.family in _VLLM_ADAPTS_EMBEDDINGS else 0
        return self.lora_parameters(rank) + tables

    def cache_values(self) -> int:
        """Number of values in the key-value cache per token."""
        return 2 * self.layers * self.kv_width


def read_shape(config: Mapping[str, Json], name: str) -> BaseShape:
    """The shape in a config.json. Raises UnknownShapeError for another architecture, or for a missing number.

    >>> config = {
    ...     "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    ...     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    ...     "max_position_embeddings": 32768, "tie_word_embeddings": True,
    ... }
    >>> shape = read_shape(config, "Qwen/Qwen2.5-0.5B-Instruct")
    >>> shape.parameters, shape.kv_width, shape.cache_values()
    (494032768, 128, 6144)
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UnknownShapeError(
            f"{name}: no memory plan for model_type {family!r}; the plan knows {', '.join(FAMILIES)}"
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        bias = bool(config.get("attention_bias", False))
        return BaseShape(
            family=family,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            positions=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bias,
            output_bias=family in ("llama", "qwen3") and bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownShapeError(f"{name}: its config.json has no usable number for {error}") from error


@dataclass(frozen=True)
class PublishedBase:
    """A base on the Hugging Face hub. `parameters` is the number that the hub shows, `source` the URL of the
    configuration."""

    name: str
    source: str
    parameters: int
    config: dict[str, Json]


@functools.cache
def published() -> tuple[PublishedBase, ...]:
    """The bases of published.json."""
    text = (Path(__file__).parent / "published.json").read_text("utf-8")
    return tuple(PublishedBase(**entry) for entry in json.loads(text))


def find_shape(name: str) -> BaseShape:
    """The shape of a base: a bundled policy, a folder, a base of published.json, or a name on the hub. Only config.json
    is read, and downloaded if necessary. Raises ConfigError if it cannot be read or planned."""
    for base in published():
        if base.name == name:
            return read_shape(base.config, name)
    folder = tiny.path(name) if name in tiny.FOLDERS else Path(name).expanduser()
    if not folder.exists() and (base := local_base(name)) is not None:
        folder = base.folder
    return shape_in(folder if folder.exists() else _from_hub(name).parent, name)


def shape_in(folder: Path, name: str) -> BaseShape:
    """The shape of the base in a folder. Raises ConfigError if its config.json cannot be read or planned."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {folder / 'config.json'} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {folder / 'config.json'} is not a JSON object")
    return read_shape(cast(dict[str, Json], config), name)


def _from_hub(name: str) -> Path:
    """Download a base's config.json. Raises ConfigError."""
    known = ", ".join(base.name for base in published())
    try:
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]  # untyped in part; a download tool that only this path needs
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: there is no such folder, and huggingface_hub is not installed, so its config.json cannot be "
            f"downloaded: pip install huggingface_hub. Known without it: {known}"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub's client raises many types; after any of them there is no config
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"--model {name}: there is no such folder, and its config.json could not be downloaded from the hub ({first}). "
            f"Known without a download: {known}"
        ) from error


GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
_LARGE = 70 * GIB
"""Bytes from which vLLM uses its larger defaults."""


@dataclass(frozen=True)
class Card:
    """A GPU with `memory` bytes, of which other programs hold `taken`. `name` is for display."""

    name: str
    memory: int
    taken: int = 0

    @property
    def usable(self) -> int:
        """Bytes that sampling and training can use."""
        return self.memory - self.taken

    @property
    def described(self) -> str:
        """Name and size, and how much other programs hold."""
        others = f", {self.taken / GIB:.1f} of them held by other programs" if self.taken else ""
        return f"{self.name} ({self.memory / GIB:.1f} GiB{others})"

    @property
    def is_large(self) -> bool:
        """Whether the plan uses vLLM 0.32's defaults for an H100. On an A100, vLLM itself uses the smaller ones, which
        need less memory."""
        return self.memory >= _LARGE

    @property
    def decoded_calls(self) -> int:
        """vLLM's default of --max-num-seqs on this card (`EngineArgs.get_batch_defaults`)."""
        return 1024 if self.is_large else 256

    @property
    def prefill_tokens(self) -> int:
        """vLLM's default of --max-num-batched-tokens on this card."""
        return 8192 if self.is_large else 2048


def parse_card(text: str) -> Card:
    """Parse a size in GB (10^9 bytes) or GiB. Raises ConfigError for other text.

    >>> parse_card("24GB").memory, parse_card("22.5GiB").memory
    (24000000000, 24159191040)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--card {text!r} is not a size: give the GPU's memory, such as 24GB or 79.6GiB")
    unit = GIB if match[2].lower() == "gib" else 10**9
    return Card(text.strip(), int(float(match[1]) * unit))


CONTEXT = GIB // 2
"""Assumed: CUDA's context and libraries of one process."""
RESERVE = GIB // 2
"""Assumed: fragmentation in the allocators, and memory that nvidia-smi does not show."""
CUDA_GRAPHS = GIB
"""Assumed: vLLM's captured CUDA graphs, with and without LoRA."""
CALL_TOKENS = 2048
"""Tokens of key-value cache to reserve per call, for prompt and completion."""
MIN_CALLS = 8
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
    calls = work.max_batch or MIN_CALLS
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


def learner_activations(shape: BaseShape, work: Workload, row_tokens: int) -> int:
    """Peak bytes of one row, whose activations are recomputed: the inputs of all layers, and the larger of one layer's
    backward pass and the logits."""
    b = work.bytes_per_value
    kept = layer_bytes(shape, work.rank, b, four_bit=work.four_bit)
    passing = 2 * b * shape.intermediate + (1 + 2 * b) * shape.hidden
    if work.four_bit:
        passing += 2 * shape.intermediate + 4 * shape.hidden
    inputs = row_tokens * shape.layers * shape.hidden * b
    logits = work.logits_chunk * shape.vocabulary * LOGIT_BYTES
    unpacked = max(inputs * outputs for inputs, outputs in shape.linears) * b if work.four_bit else 0
    return inputs + unpacked + max(row_tokens * (kept + passing), logits)


LAYOUTS: tuple[MemoryLayout, ...] = get_args(MemoryLayout)
"""All layouts, the quickest first.

* side_by_side: both stay on the GPU, and calls are answered during a step.
* free_cache: vLLM frees its key-value cache for a step and keeps its weights.
* offload: the learner's weights, adapter and optimizer are in host memory while vLLM samples; vLLM sleeps during a step."""

_ALL = tuple(field.name for field in fields(Parts))
_LEARNER_STATE = ("learner_weights", "learner_adapter", "learner_optimizer")
_STEP_ONLY = ("learner_gradients", "learner_activations")
_SAMPLING: dict[MemoryLayout, tuple[str, ...]] = {
    "side_by_side": _ALL,
    "free_cache": tuple(name for name in _ALL if name not in _STEP_ONLY),
    "offload": tuple(name for name in _ALL if name not in _STEP_ONLY + _LEARNER_STATE),
}
_STEP: dict[MemoryLayout, tuple[str, ...]] = {
    "side_by_side": _ALL,
    "free_cache": tuple(name for name in _ALL if name != "cache"),
    "offload": ("cuda_graphs", *_LEARNER_STATE, *_STEP_ONLY, "contexts"),
}


def sampling_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Part -> bytes on the GPU while calls are answered."""
    return {name: getattr(held, name) for name in _SAMPLING[layout]}


def step_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Part -> bytes on the GPU at the peak of a step."""
    return {name: getattr(held, name) for name in _STEP[layout]}


def peak_bytes(layout: MemoryLayout, held: Parts) -> int:
    """Most bytes on the GPU at any time, with the smallest cache."""
    return max(sum(sampling_parts(layout, held).values()), sum(step_parts(layout, held).values()))


PROCESSES = 3 * GIB
"""Assumed: what the learner's process and vLLM's two hold without the copies. With their imports alone, without CUDA, they
hold 1.5 GiB (measured on a CPU)."""


def host_bytes(layout: MemoryLayout, held: Parts) -> int:
    """Bytes of host memory: the processes' own, and with `offload` the learner's copy, which stays there, and what vLLM
    moves there when it sleeps. A torch without exact pinned sizes rounds blocks up to powers of two."""
    if layout != "offload":
        return PROCESSES
    copies = held.learner_state + held.sampler_weights + held.sampler_adapters
    return PROCESSES + copies * (2 if EXACT_MIB is None else 1)
