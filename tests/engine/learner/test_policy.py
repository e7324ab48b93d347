"""The policy: sampling settings, adapters on disk, determinism, and models that must not be trained on a tree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from offbook.base.config import LayoutName, LoraOptions
from offbook.base.errors import ConfigError
from offbook.engine.learner.model import attention
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.rows.layouts import plan
from offbook.engine.protocol import Sample
from offbook.engine.sampling import TargetSettings
from tests.engine.learner.tiny_models import VOCABULARY, warm, write_base

Policies = Callable[[str, torch.dtype], Policy]
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


def settings(ids: np.ndarray, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> TargetSettings:
    full = np.full(len(ids), 1.0)
    return TargetSettings(
        ids.astype(np.int64), full * temperature, full * top_p, np.full(len(ids), top_k, np.int64), full * min_p
    )


def every_token() -> list[Sample]:
    """Each token of the vocabulary, sampled once after the same prompt: the whole distribution."""
    return [Sample.bare(PROMPT, np.array([token], np.int32), token) for token in range(VOCABULARY)]


def distribution(
    policy: Policy, chosen: TargetSettings, layout: LayoutName = "tree"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [
        (row.target_numbers, policy.row_logprobs(row, chosen))
        for row in plan(every_token(), layout, 4096, policy.shape).rows
    ]
    ids = np.concatenate([ids for ids, _ in parts])
    columns = [torch.cat(column)[np.argsort(ids)] for column in zip(*(values for _, values in parts), strict=True)]
    return columns[0], columns[1], columns[2]


@torch.no_grad()
def logits(policy: Policy) -> np.ndarray:
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    return policy.model(input_ids=ids, use_cache=False).logits[0, -1].numpy()


def processed(scores: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """vLLM's processed logprobs, token by token: temperature, min-p, top-k, top-p, log-softmax."""
    scores = scores / temperature
    probs = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    kept = probs >= min_p * probs.max()
    if top_k:
        kept &= scores >= np.sort(np.where(kept, scores, -np.inf))[::-1][top_k - 1]
    probs = np.where(kept, probs, 0) / probs[kept].sum()
    if top_p < 1:
        best = np.argsort(-probs)
        needed = int(np.searchsorted(np.cumsum(probs[best]), top_p)) + 1  # the fewest tokens that reach top-p
        kept &= np.isin(np.arange(len(probs)), best[:needed])
    with np.errstate(divide="ignore"):
        return np.log(np.where(kept, probs, 0) / probs[kept].sum())


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.7, 1.0, 0, 0.0),
        (1.5, 0.8, 0, 0.0),
        (1.0, 1.0, 5, 0.0),
        (0.7, 1.0, 0, 0.1),
        (1.5, 0.7, 9, 0.05),
    ],
)
def test_sampling_settings_are_reproduced(policies: Policies, temperature, top_p, top_k, min_p) -> None:
    policy = policies("qwen2", torch.float64)
    expected = processed(logits(policy), temperature, top_p, top_k, min_p)
    logprobs, entropy, kept = distribution(policy, settings(np.arange(VOCABULARY), temperature, top_p, top_k, min_p))
    inside = np.isfinite(expected)
    assert kept.tolist() == inside.tolist()
    np.testing.assert_allclose(logprobs.detach().numpy()[inside], expected[inside], atol=1e-9)
    np.testing.assert_allclose(entropy.numpy(), -(np.exp(expected[inside]) * expected[inside]).sum(), atol=1e-9)


def test_a_token_outside_the_kept_set_has_no_gradient(policies: Policies) -> None:
    policy = policies("qwen2", torch.float64)
    logprobs, _, kept = distribution(policy, settings(np.arange(VOCABULARY), top_k=4))
    assert int(kept.sum()) == 4
    gradients = torch.autograd.grad(logprobs[~kept].sum(), list(policy.trainable_parameters().values()))
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients)


def test_a_target_at_temperature_zero_is_never_kept(policies: Policies) -> None:
    _, _, kept = distribution(policies("qwen2", torch.float64), settings(np.arange(VOCABULARY), temperature=0.0))
    assert not kept.any()


def test_calls_of_one_row_keep_their_own_settings(policies: Policies) -> None:
    policy = policies("qwen2", torch.float64)
    mixed = settings(np.arange(VOCABULARY))
    mixed = replace(mixed, temperature=np.where(np.arange(VOCABULARY) % 2, 0.7, 1.5))
    logprobs, _, _ = distribution(policy, mixed)
    cold, hot = (distribution(policy, settings(np.arange(VOCABULARY), t))[0] for t in (0.7, 1.5))
    odd = torch.arange(VOCABULARY) % 2 == 1
    torch.testing.assert_close(logprobs, torch.where(odd, cold, hot), rtol=0, atol=1e-12)


def test_a_fresh_adapter_is_the_base_and_its_weights_come_from_the_seed(base) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4, seed=5))
    first = {name: value.clone() for name, value in policy.adapter_weights().items()}
    assert all(float(value.abs().max()) == 0 for name, value in first.items() if "lora_B" in name)
    warm(policy)
    policy.reset_adapter(LoraOptions(r=2, alpha=4, seed=5))
    assert all(torch.equal(value, first[name]) for name, value in policy.adapter_weights().items())
    policy.reset_adapter(LoraOptions(r=3, alpha=4, seed=6))
    assert {value.shape[0] for name, value in policy.adapter_weights().items() if "lora_A" in name} == {3}


def test_without_the_adapter_the_base_answers(base) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    chosen = settings(np.arange(VOCABULARY))
    before = distribution(policy, chosen)[0].detach()
    warm(policy)
    (row,) = plan(every_token(), "tree", 4096, policy.shape).rows
    with torch.no_grad():
        plain, _, _ = policy.row_logprobs(row, chosen, adapter=False)
    torch.testing.assert_close(plain, before[torch.from_numpy(row.target_numbers)], rtol=0, atol=0)
    assert all(value.requires_grad for value in policy.trainable_parameters().values())
    assert policy.trainable_parameters()


def test_an_adapter_goes_to_disk_as_peft_loads_it_and_back(base, tmp_path: Path) -> None:
    folder = base("qwen2")
    policy = warm(Policy.load(folder, LoraOptions(r=2, alpha=4), name="org/base"))
    policy.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "org/base"
    assert written["inference_mode"] is True
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    with torch.no_grad():
        expected = plain(input_ids=torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(logits(policy), expected, atol=1e-5)
    other = Policy.load(folder, LoraOptions(r=2, alpha=4, seed=9))
    other.load_adapter(tmp_path / "adapter")
    assert all(torch.equal(value, policy.adapter_weights()[name]) for name, value in other.adapter_weights().items())
    with pytest.raises(ConfigError, match="r is 2, this model was registered with 3"):
        Policy.load(folder, LoraOptions(r=3, alpha=4)).load_adapter(tmp_path / "adapter")


def test_the_same_row_gives_the_same_bits(policies: Policies) -> None:
    policy, chosen = policies("qwen2", torch.float32), settings(np.arange(VOCABULARY), 0.7)
    (row,) = plan(every_token(), "tree", 4096, policy.shape).rows

    def run() -> list[torch.Tensor]:
        logprobs, _, _ = policy.row_logprobs(row, chosen)
        return [logprobs, *torch.autograd.grad(logprobs.sum(), list(policy.trainable_parameters().values()))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mask_probe_accepts_full_attention(base, family: str, dtype: torch.dtype) -> None:
    policy = Policy.load(base(family), LoraOptions(r=2, alpha=4), dtype=dtype)
    assert mask_probe(policy) is None
    assert policy.tree_refused is None


def test_a_model_that_ignores_the_tree_is_found_by_the_probe_and_planned_on_plain_rows(base) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    config: Any = policy.model.get_base_model().config
    config._attn_implementation = "sdpa"  # an engine that drops what it does not know
    assert mask_probe(policy) is not None
    assert policy.tree_difference is not None and policy.tree_difference > 0.01
    made = plan(every_token(), "tree", 4096, policy.shape, tree_refused=policy.tree_refused)
    assert made.layout != "tree"
    assert made.refused is not None and "mask probe" in made.refused


def test_an_error_on_a_tree_is_a_refusal_and_plain_rows_are_planned(
    base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise AttributeError("no rotary_emb")

    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    monkeypatch.setattr(attention, "_chosen", failing)
    assert mask_probe(policy) is not None and policy.tree_difference is None
    assert policy.tree_refused == "a tree raises AttributeError: no rotary_emb"
    assert plan(every_token(), "tree", 4096, policy.shape, tree_refused=policy.tree_refused).layout != "tree"


def test_a_tree_whose_backward_pass_is_wrong_is_refused_though_its_logprobs_agree(
    base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention._flash_backward

    def wrong(*arguments: object, **options: object) -> list[torch.Tensor]:
        return [2 * part for part in right(*arguments, **options)]

    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    monkeypatch.setattr(attention, "_flash_backward", wrong)
    refused = mask_probe(policy)
    assert policy.tree_difference is not None and policy.tree_difference < 1e-3
    assert re.match(r"the gradients of tree and plain rows differ by [\d.]+ of their norm", refused or "")
    assert all(value.grad is None for value in policy.trainable_parameters().values())


def test_a_layer_that_computes_another_attention_is_refused_even_where_its_logprobs_agree(
    base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    monkeypatch.setattr(policy, "shape", replace(policy.shape, layers=policy.shape.layers + 1))
    refused = mask_probe(policy)
    assert policy.tree_difference is not None and policy.tree_difference < 1e-3
    assert refused == "4 of 6 attention layers of the mask probe ran on the tree"


def test_a_window_longer_than_the_probe_is_refused(
    base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, alpha=4))
    monkeypatch.setattr(Policy, "window", 8193)
    assert mask_probe(policy) == "a sliding window of 8193 tokens is longer than the mask probe's 8192"


@pytest.mark.parametrize("layout", ["tree", "leaf_rows", "call_rows"])
def test_a_sliding_window_is_kept_on_every_layout(tmp_path: Path, layout: LayoutName) -> None:
    folder = write_base(
        tmp_path / "base", "qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=0, num_hidden_layers=2
    )
    policy = Policy.load(folder, LoraOptions(r=2, alpha=4))
    assert mask_probe(policy) is None
    made = plan(every_token(), layout, 4096, policy.shape, tree_refused=policy.tree_refused)
    chosen = settings(np.arange(VOCABULARY))
    (row,) = made.rows
    with torch.no_grad():
        logprobs, _, _ = policy.row_logprobs(row, chosen)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(input_ids=torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[torch.from_numpy(row.target_numbers)], rtol=0, atol=1e-5)


def test_target_modules_that_match_nothing_are_refused(base) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        Policy.load(base("qwen2"), LoraOptions(target_modules=("no_such_layer",)))


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")  # PEFT says it first
def test_what_the_sampler_cannot_adapt_is_refused_before_anything_is_trained(base) -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_tokens is no linear layer"):
        Policy.load(base("qwen2"), LoraOptions(target_modules=("embed_tokens", "q_proj")))


def test_dropout_acts_on_the_adapter_and_only_where_there_are_gradients(base) -> None:
    policy = Policy.load(base("qwen2"), LoraOptions(r=2, dropout=0.5))
    for name, value in policy.trainable_parameters().items():
        if "lora_B" in name:
            value.data.fill_(0.1)
    made = plan(every_token(), "call_rows", 4096, policy.shape)
    chosen = settings(np.arange(VOCABULARY))

    def twice() -> bool:
        first, second = (policy.row_logprobs(made.rows[0], chosen)[0].detach() for _ in range(2))
        return torch.equal(first, second)

    assert not twice()
    with torch.no_grad():
        assert twice()
