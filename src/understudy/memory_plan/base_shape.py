"""The shape of a base model, read from its config.json, and what it holds: weights, LoRA weights, key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..types import Json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the architectures whose weights are counted here."""
_VLLM_ADAPTS_EMBEDDINGS = ("llama", "qwen3")
"""Families for which vLLM 0.32 holds LoRA slots of the embeddings and the head too (`embedding_modules` of its models)."""


@dataclass(frozen=True)
class BaseShape:
    """A decoder of equal layers: attention with grouped keys and values, a gated MLP, RMS norms."""

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
        """Width of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(input, output) of one layer's linear layers: q, k, v, o, gate, up, down."""
        h, q, kv, i = self.hidden, self.q_width, self.kv_width, self.intermediate
        return ((h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h))

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear layers, without biases: what 4 bits make smaller."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def other_parameters(self) -> int:
        """Embeddings, head, norms and biases."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        biases = (self.q_width + 2 * self.kv_width) * self.attention_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        return tables + self.layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the base."""
        return self.linear_parameters + self.other_parameters

    def lora_parameters(self, rank: int) -> int:
        """Weights of a LoRA on all linear layers of the text model, the head left out."""
        return rank * self.layers * sum(inputs + outputs for inputs, outputs in self.linears)

    def slot_parameters(self, rank: int) -> int:
        """Weights of one adapter's place in vLLM, which keeps places for the embeddings of some families as well."""
        tables = 2 * rank * (self.vocabulary + self.hidden) if self.family in _VLLM_ADAPTS_EMBEDDINGS else 0
        return self.lora_parameters(rank) + tables

    def cache_values(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.layers * self.kv_width


def read_shape(config: Mapping[str, Json], name: str) -> BaseShape:
    """The shape that a config.json tells. Raises ConfigError for another architecture, or a number that is missing."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigError(
            f"{name}: no memory plan for model_type {family!r}; it counts the weights of {', '.join(FAMILIES)}"
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
        raise ConfigError(f"{name}: its config.json has no usable number for {error}") from error
