"""Layers with a window follow the tree, those with a state train on plain rows; a step is what each call alone would be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    SiglipVisionConfig,
)

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import ConfigError
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.targets.batch import TrainBatch
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.test_invariance import batch_of, distance, gradients
from tests.engine.learner.tiny_models import VOCABULARY, warm

WINDOW = 5
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, sliding_window_pattern=2),  # type: ignore[call-arg]
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SHAPE, **DELTA_NET),
    "qwen3_next": lambda: Qwen3NextConfig(**SHAPE, **DELTA_NET, mlp_only_layers=[0, 1, 2, 3]),
}
# By name: among all linear layers PEFT counts this family's experts, which are no layers in transformers.
LAYERS = {"qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")}
REASONS = {
    "qwen3_5": "linear_attention",
    "qwen3_next": "linear_attention",
}


def write(folder: Path, config: PreTrainedConfig) -> Path:
    """A random model whose weights are large enough that every token matters."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Policy]:
    """A policy of a family, its adapter warm, in float64."""
    made: dict[str, Policy] = {}

    def of(family: str) -> Policy:
        if family not in made:
            folder = write(tmp_path_factory.mktemp(family), CONFIGS[family]())
            lora = LoraOptions(r=2, alpha=4, target_modules=LAYERS.get(family, "all-linear"))
            made[family] = warm(Policy.load(folder, lora, dtype=torch.float64, threads=1))
        return made[family]

    return of


def alone(policy: Policy, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of the batch's targets, and the gradient of DAPO's first update, - advantage x logprob / tokens: each call
    on its own, through the whole model."""
    parameters = policy.trainable_parameters()
    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    logprobs: list[Tensor] = []
    for row in batch.samples:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids]).astype(np.int64))[None]
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
        scaled = (logits / row.sampling.temperature).log_softmax(-1)
        values = scaled.gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        advantage = batch.advantages[row.offset]
        grads = torch.autograd.grad(
            (-advantage * values / len(batch)).sum(), list(parameters.values()), allow_unused=True
        )
        for name, grad in zip(parameters, grads, strict=True):
            total[name] += 0 if grad is None else grad
        logprobs.append(values.detach().double())
    return torch.cat(logprobs), total


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_step_on_every_layout_equals_each_call_alone(policy_of, family: str) -> None:
    policy = policy_of(family)
    assert (mask_probe(policy) is None) == (family not in REASONS)
    batch = batch_of(random_groups(3, groups=2, rollouts=4, turns=3, vocabulary=VOCABULARY))
    logprobs, expected = alone(policy, batch)
    for layout in ("auto", "tree", "call_rows", "leaf_rows"):
        config = TrainConfig(loss="dapo", importance_cap=None, max_grad_norm=1e9, layout=layout, row_tokens=4096)
        outcome, [found] = gradients(policy, batch, config)
        [plan] = outcome.plans
        if family in REASONS:
            assert plan.layout != "tree"
            assert plan.refused is not None and REASONS[family] in plan.refused
        else:
            assert plan.refused is None
            assert plan.layout == layout or layout == "auto"
            assert max(int(row.positions.max()) for row in plan.rows) >= WINDOW
        if family in REASONS or layout == "call_rows":
            assert any(row.lengths.min() < row.lengths.max() for row in plan.rows), "no padding in this plan"
        # Norms, and the state of gated delta nets, are computed in float32 whatever the model's precision.
        torch.testing.assert_close(outcome.old.logprobs, logprobs, rtol=0, atol=2e-5)
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_window_or_state_of_these_models_reaches_the_answer(policy_of, family: str) -> None:
    """A prompt beyond the window or the convolution changes nothing, or something: the tests above see real layers."""
    policy = policy_of(family)
    ids = torch.arange(28)[None] % VOCABULARY
    other = ids.clone()
    other[0, 0] = 17
    with torch.no_grad():
        first, second = (policy.model(input_ids=each, use_cache=False).logits[0, -1] for each in (ids, other))
    changed = float((first - second).abs().max())
    if family == "mistral":  # four layers of five tokens see 16 tokens back
        assert changed == 0
    else:
        assert changed > 1e-4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CohereConfig(**SHAPE, logit_scale=0.0625), r"'cohere' scales its logits \(logit_scale 0.0625\)"),
        (GraniteConfig(**SHAPE, logits_scaling=8.0), r"'granite' scales its logits \(logits_scaling 8\)"),
    ],
    ids=["cohere", "granite"],
)
def test_a_base_that_scales_its_logits_is_refused_before_its_weights_are_read(
    tmp_path: Path, config: PreTrainedConfig, words: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        Policy.load(tmp_path, LoraOptions())


def test_of_a_model_with_a_vision_tower_the_text_layers_learn(tmp_path: Path) -> None:
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text: Any = CONFIGS["gemma3"]()
    folder = write(tmp_path / "base", Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1))
    policy = warm(Policy.load(folder, LoraOptions(r=2, alpha=4), threads=1))
    batch = batch_of(random_groups(3, vocabulary=VOCABULARY))
    _, expected = alone(policy, batch)
    config = TrainConfig(loss="dapo", importance_cap=None, max_grad_norm=1e9)
    _, [found] = gradients(policy, batch, config)
    assert not [name for name in policy.adapter_weights() if "vision" in name or "projector" in name]
    assert distance(found, expected) < 1e-4
