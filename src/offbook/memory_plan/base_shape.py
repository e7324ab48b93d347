"""The shape of a base model, read from its config.json, and what follows from it: numbers of weights, LoRA weights and
key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offbook.base.errors import ConfigError
from offbook.base.types import Json

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
