"""Published architectures train exactly: a step is what each call alone is through transformers' own model, and the adapter
has the names of the class that vLLM loads. The table in docs/models.md has a line for each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.errors import ConfigError
from offbook.engine.base_model import architecture_of
from offbook.engine.inference.decoding.model import load_model
from offbook.engine.learner.model import attention
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import eager_probe, mask_probe
from offbook.server.errors import ApiError
from offbook.server.models.registration import check_target_modules
from offbook.tiny import path as tiny_policy
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.test_architectures import alone
from tests.engine.learner.test_invariance import batch_of, distance, gradients
from tests.engine.learner.tiny_models import VOCABULARY, warm
from tests.families.bases import BASES, Base, write_random
from tests.paths import ROOT

QUICK = {"Qwen3 MoE", "Gemma 4", "Qwen3.5", "gpt-oss"}
BY_NAME = {base.name: base for base in BASES}
EACH = [
    pytest.param(base, id=base.name, marks=[] if base.name in QUICK else [pytest.mark.slow("more model families")])
    for base in BASES
]


def table_line(base: Base) -> str:
    """The base's line in docs/models.md."""
    left_out = ", ".join(f"`{name}`" for name in base.left_out) or "nothing"
    embedded = "refused by name" if base.embedded else "yes"
    return f"| {base.name} | `{base.whole}` | {left_out} | {base.layout} | {embedded} |"


def test_the_table_in_the_docs_is_that_of_these_tests() -> None:
    lines = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| base | loaded as | an adapter leaves out | trained on | embedded engine |")
    assert lines[begin + 2 : begin + 2 + len(BASES)] == [table_line(base) for base in BASES]


@pytest.mark.parametrize("base", EACH)
def test_a_published_architecture_trains_exactly(base: Base, tmp_path: Path) -> None:
    folder = write_random(base, tmp_path / "base")
    policy = Policy.load(folder, LoraOptions(r=2, alpha=4), threads=1)
    difference = eager_probe(policy)
    assert difference is not None and difference < 1e-4
    assert (mask_probe(policy) is None) == (base.layout == "trees"), policy.tree_refused
    assert policy.left_out == base.left_out
    assert not [name for name in policy.adapter_weights() if "vision" in name or "visual" in name]
    whole = architecture_of(AutoConfig.from_pretrained(folder))
    assert whole.__name__ == base.whole
    modules = {name for name, _ in whole.from_pretrained(folder).named_modules()}
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in policy.adapter_weights()}
    assert adapted and adapted <= modules

    warm(policy)
    batch = batch_of(random_groups(3, groups=2, rollouts=4, turns=3, vocabulary=VOCABULARY))
    with policy.eager_attention():
        logprobs, expected = alone(policy, batch)
    config = TrainConfig(loss="dapo", importance_cap=None, max_grad_norm=1e9, row_tokens=4096)
    outcome, [found] = gradients(policy, batch, config)
    torch.testing.assert_close(outcome.old.logprobs, logprobs, rtol=0, atol=1e-4)
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize("base", EACH)
def test_the_embedded_engine_computes_an_architecture_or_refuses_it_by_name(base: Base, tmp_path: Path) -> None:
    folder = write_random(base, tmp_path / "base")
    for file in tiny_policy().glob("*token*"):
        shutil.copy(file, folder)

    def probe() -> float:
        return load_model(folder, device="cpu", dtype="float32", max_model_len=None).probe()

    if base.embedded:
        with pytest.raises(ConfigError, match=re.escape(base.embedded)):
            probe()
    else:
        assert probe() < 1e-4


def test_attention_that_is_not_the_architectures_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.load(write_random(BY_NAME["Qwen3"], tmp_path / "base"), LoraOptions(), threads=1)
    right = attention.sdpa_attention_forward

    def wrong(module, query, key, value, mask, **options):
        return right(module, query, key, value.roll(1, 2), mask, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", wrong)
    with pytest.raises(
        ConfigError, match=r"'qwen3'.*'offbook_tree' differ by .* nats from those with transformers' `eager`"
    ):
        eager_probe(policy)


def test_sinks_never_reach_an_attention_that_drops_them() -> None:
    states = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="takes s_aux, which neither SDPA nor attention on a tree computes"):
        attention.tree_attention(torch.nn.Module(), states, states, states, None, s_aux=torch.zeros(1))


def test_the_target_modules_of_a_mixture_of_experts_are_checked_when_it_is_registered(tmp_path: Path) -> None:
    policy = Policy.load(write_random(BY_NAME["Qwen3 MoE"], tmp_path / "base"), LoraOptions(), threads=1)
    check_target_modules(("q_proj", "v_proj"), policy.linear_layers)
    with pytest.raises(ApiError, match="'experts' matches no linear layer"):
        check_target_modules(("q_proj", "experts"), policy.linear_layers)
    policy.reset_adapter(LoraOptions(target_modules=("q_proj",)))
    assert all(".q_proj." in name for name in policy.adapter_weights())
