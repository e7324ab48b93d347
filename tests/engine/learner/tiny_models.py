"""Tiny random models for the learner's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from offbook.engine.learner.model.policy import Policy

VOCABULARY = 29
torch.set_num_threads(1)  # the models are tiny, and the suite shares its cores
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_base(folder: Path, family: str, **changes: object) -> Path:
    """Save a random model whose weights are large enough that every token matters."""
    torch.manual_seed(1)
    config, kind = (Qwen2Config, Qwen2ForCausalLM) if family == "qwen2" else (LlamaConfig, LlamaForCausalLM)
    model = kind(config(**{**SHAPE, "tie_word_embeddings": family == "qwen2", **changes}))
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def warm(policy: Policy) -> Policy:
    """Give the adapter weights in both factors, so that every gradient is non-zero."""
    generator = torch.Generator().manual_seed(2)
    for value in policy.trainable_parameters().values():
        value.data = torch.randn(value.shape, generator=generator, dtype=torch.float64).mul(0.2).to(value.dtype)
    return policy


class ExactNorm:
    """RMSNorm in the input's precision: transformers' own rounds to float32, also in a float64 model."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self._norm.variance_epsilon)
        return self._norm.weight * states * root


def exact(policy: Policy) -> Policy:
    """Make a float64 policy float64 throughout."""
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "forward", ExactNorm(module))  # noqa: B010  # torch types attributes as tensors
    return policy
