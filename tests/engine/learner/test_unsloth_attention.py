"""The tree inside Unsloth's own attention: real forward passes on a CPU, and what happens where another version differs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from offbook.base.errors import install_command
from offbook.engine.learner.model import unsloth_attention
from offbook.engine.learner.model.attention import TreeContext, tree_attention
from offbook.engine.learner.model.unsloth_attention import (
    DISPATCH,
    SLOT,
    Signatures,
    install,
    patched,
)
from offbook.engine.learner.rows.cost import ModelShape
from offbook.engine.learner.rows.layouts import plan
from tests.engine.learner.make_unsloth_signatures import FILE
from tests.engine.learner.test_policy import every_token
from tests.paths import ROOT

SECONDS = 600
EXACT = 1e-5
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WINDOWED = "mistral, window 16"
LAYERS = 3
SHAPE = ModelShape(layers=1, heads=4, head_dim=8, linear=1000, lora=10, head=100)


@pytest.fixture(scope="module")
def measured(require: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require(importlib.util.find_spec("unsloth") is not None, install_command("unsloth"))
    folder = tmp_path_factory.mktemp("unsloth")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.learner.unsloth_forwards", str(folder / "measured.json")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "measured.json").read_text("utf-8"))


@pytest.mark.slow("real Unsloth")
@pytest.mark.parametrize("family", [*FAMILIES, WINDOWED])
def test_a_tree_in_unsloths_forward_passes_has_the_logprobs_and_gradients_of_its_rows(
    measured: dict[str, Any], family: str
) -> None:
    found = measured[family]
    assert found["forward"].startswith("unsloth.models.")
    ok, difference, reason = found["probe"]
    assert ok and difference < EXACT and reason is None
    assert (found["attention"], found["auto"]) == ("flash_pieces", "tree")
    assert found["longest_row"] == 512  # the model's table of positions ends there
    for name in ("transformers", "tree", "packed leaf rows"):
        assert max(found[name].values()) < EXACT, (name, found[name])
    assert "T_pad" in found["unhooked"]  # without the wrapper a tree is an error, never a plain causal row


@pytest.mark.slow("real Unsloth")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["torch", "unsloth", "unsloth offloaded", "unsloth smart"])
def test_a_tree_is_the_same_when_its_layers_are_computed_again_in_the_backward_pass(
    measured: dict[str, Any], family: str, name: str
) -> None:
    assert max(measured[family][f"tree, recomputed by {name}"].values()) < EXACT
    assert measured[family][f"layers, recomputed by {name}"] == [LAYERS, LAYERS]


@pytest.mark.slow("real Unsloth")
def test_a_version_whose_context_lost_a_field_is_refused_by_name_and_trains_rows(measured: dict[str, Any]) -> None:
    refused, layout = measured["moved"]
    assert "AttentionContext has no field moved_field" in refused
    assert layout in ("leaf_rows", "call_rows")


def test_the_version_that_gpus_get_has_the_attention_that_trees_were_written_for() -> None:
    found = json.loads(FILE.read_text("utf-8"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (pin,) = (line for line in extras["unsloth"] if line.startswith("unsloth=="))
    assert pin.startswith(f"unsloth=={found['version']};"), f"run {FILE.with_name('make_unsloth_signatures.py')}"
    names = (frozenset(found[part]) for part in ("parameters", "config", "context"))
    assert Signatures(*names).mismatch() is None
    for family, calls in found["families"].items():
        assert set(calls["run_attention"]) == unsloth_attention.PARAMETERS, family
        assert SLOT in calls["AttentionContext"], family


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameters": frozenset({"config", "context", "query", "key", "value"})}, "run_attention takes"),
        ({"context": unsloth_attention.CONTEXT_FIELDS - {SLOT}}, f"AttentionContext has no field {SLOT}"),
        ({"config": frozenset({"backend"})}, "AttentionConfig has no field flash_dense_kwargs"),
    ],
)
def test_other_names_are_a_mismatch(change: dict[str, frozenset[str]], words: str) -> None:
    known = {
        "parameters": unsloth_attention.PARAMETERS,
        "config": unsloth_attention.CONFIG_FIELDS,
        "context": unsloth_attention.CONTEXT_FIELDS | {"training"},
    }
    assert Signatures(**known).mismatch() is None
    assert words in (Signatures(**{**known, **change}).mismatch() or "")


@dataclass
class Config:
    flash_dense_kwargs: dict[str, Any] | None = None
    flash_varlen_kwargs: dict[str, Any] | None = None
    sdpa_kwargs: dict[str, Any] | None = None
    xformers_kwargs: dict[str, Any] | None = None


@dataclass
class Context:
    seq_info: Any = None
    attention_mask: torch.Tensor | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    prefix_seg_info: Any = None


def plain(*, config: Any, context: Any, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> str:
    return "Unsloth's own"


MODULE = """
class Attention:
    pass

def fast_forward(self, config, context, Q, K, V):
    return run_attention(config=config, context=context, Q=Q, K=K, V=V)
"""


@dataclass
class Fake:
    """Stands in for the two modules of Unsloth: the dispatch, and a family whose attention calls it."""

    dispatch: Any
    family: Any
    model: torch.nn.Module

    def attend(self, states: torch.Tensor, context: Context, config: Config | None = None) -> Any:
        query, key, value = states
        return self.family.fast_forward(None, config or Config(), context, query, key, value)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    dispatch, family = ModuleType(DISPATCH), ModuleType("unsloth.models.fake")
    vars(dispatch).update(run_attention=plain, AttentionConfig=Config, AttentionContext=Context)
    exec(MODULE, vars(family))
    vars(family)["run_attention"] = plain
    for module in (dispatch, family):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("unsloth", "unsloth.utils", "unsloth.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    layer = type("FakeAttention", (torch.nn.Module,), {"forward": family.fast_forward})()
    yield Fake(dispatch, family, torch.nn.Sequential(layer))


@pytest.fixture
def tree() -> TreeContext:
    (row,) = plan(every_token(), "tree", 4096, SHAPE).rows
    assert row.forest is not None
    return TreeContext(row.forest.segments, row.forest.pieces, row.forest.subtree_end)


@pytest.fixture
def states(tree: TreeContext) -> torch.Tensor:
    return torch.randn(3, 1, 4, sum(tree.lengths), 8, generator=torch.Generator().manual_seed(0))


def test_the_wrapper_computes_trees_and_passes_everything_else_on(
    fake: Fake, tree: TreeContext, states: torch.Tensor
) -> None:
    assert patched(fake.model)
    assert install(fake.model) is None and install(fake.model) is None  # once, however often it is called
    assert getattr(fake.dispatch.run_attention, unsloth_attention._WRAPPED) is plain
    assert fake.attend(states, Context()) == "Unsloth's own"
    assert fake.attend(states, Context(prefix_seg_info="Unsloth's own segments")) == "Unsloth's own"
    out = fake.attend(states, Context(prefix_seg_info=tree), Config(flash_varlen_kwargs={"softmax_scale": 0.5}))
    query, key, value = states
    expected, _ = tree_attention(torch.nn.Identity(), query, key, value, None, 0.5, offbook_tree=tree)
    assert torch.equal(out, expected)
    assert tree.calls == 2


def test_packed_sequences_that_unsloth_reads_from_the_positions_must_be_the_rows_trees(
    fake: Fake, tree: TreeContext, states: torch.Tensor
) -> None:
    install(fake.model)
    (length,) = tree.lengths
    own, others = (torch.tensor(sizes) for sizes in ([length], [length - 1, 1]))
    assert fake.attend(states, Context((own, own, length), prefix_seg_info=tree)).shape == (1, length, 4, 8)
    with pytest.raises(ValueError, match="seq_info"):
        fake.attend(states, Context((others, others, length - 1), prefix_seg_info=tree))


@pytest.mark.parametrize(
    ("context", "config", "words"),
    [
        ({"attention_mask": torch.ones(1)}, {}, "attention_mask"),
        ({"is_causal": False}, {}, "is_causal"),
        ({}, {"flash_dense_kwargs": {"softcap": 30.0}}, "softcap"),
        ({}, {"flash_varlen_kwargs": {"dropout_p": 0.1}}, "dropout_p"),
        ({}, {"flash_dense_kwargs": {"window_size": (4, 4)}}, "window_size"),
        ({}, {"sdpa_kwargs": {"new_option": None}}, "new_option"),
        ({}, {"sdpa_kwargs": {"scale": 0.5}, "flash_varlen_kwargs": {"softmax_scale": 0.25}}, "scales"),
    ],
)
def test_what_a_tree_does_not_compute_is_an_error(
    fake: Fake, tree: TreeContext, states: torch.Tensor, context: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    install(fake.model)
    with pytest.raises(ValueError, match=words):
        fake.attend(states, Context(prefix_seg_info=tree, **context), Config(**config))


def test_positions_whose_factors_depend_on_the_rows_length_are_refused(fake: Fake) -> None:
    assert install(fake.model) is None
    fake.model.config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})  # type: ignore[assignment]
    assert "'dynamic' positions by the row's length" in (install(fake.model) or "")


def test_layers_that_call_another_attention_or_a_dispatch_that_is_gone_are_refused_and_left_alone(fake: Fake) -> None:
    vars(fake.family)["run_attention"] = lambda **_: None
    assert "unsloth.models.fake.fast_forward does not call run_attention" in (install(fake.model) or "")
    assert fake.dispatch.run_attention is plain
    vars(fake.family)["run_attention"] = plain
    del fake.dispatch.AttentionContext
    assert "AttributeError" in (install(fake.model) or "")
    assert fake.dispatch.run_attention is plain and fake.family.run_attention is plain
    assert not patched(torch.nn.Sequential(torch.nn.MultiheadAttention(4, 1)))
