"""Every counted line of a plan, computed again by torch, transformers and PEFT on the meta device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from offbook.engine.learner.model.target_logprobs import target_logprobs
from offbook.engine.sampling import TargetSettings
from offbook.memory_plan.parts import (
    LOGIT_BYTES,
    BaseShape,
    PublishedBase,
    Workload,
    cache_per_token,
    find_shape,
    layer_bytes,
    learner_weights,
    parse_card,
    parts,
    published,
)
from tests.memory_plan.meta_model import LiveBytes, MetaBase

RANK, TOKENS = 16, 512
CARD = parse_card("24GB")
ONE_OF_EACH = {shape.family: base for base in reversed(published()) for shape in [find_shape(base.name)]}
each_base = pytest.mark.parametrize("base", published(), ids=lambda base: base.name)
each_family = pytest.mark.parametrize("base", ONE_OF_EACH.values(), ids=lambda base: base.name)


def shape_of(base: PublishedBase, layers: int | None = None) -> BaseShape:
    shape = find_shape(base.name)
    return shape if layers is None else BaseShape(**{**vars(shape), "layers": layers})


@pytest.mark.slow("measured memory")
@each_base
def test_weights_adapter_gradients_and_optimizer_are_torchs_to_the_byte(base: PublishedBase) -> None:
    meta, held = MetaBase(base.config, RANK), parts(shape_of(base), CARD, Workload(rank=RANK), TOKENS)
    assert held.sampler_weights == held.learner_weights == meta.base_bytes == 2 * base.parameters
    assert held.learner_adapter == sum(value.nbytes for value in meta.adapter)
    optimizer = torch.optim.AdamW(meta.adapter)
    for value in meta.adapter:
        value.grad = torch.empty_like(value)
    assert held.learner_gradients == sum(value.grad.nbytes for value in meta.adapter if value.grad is not None)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert held.learner_optimizer == sum(moment.nbytes for moment in moments)


@each_base
def test_a_slot_of_vllm_holds_the_adapter_in_16_bits_and_embeddings_where_vllm_adapts_them(base: PublishedBase) -> None:
    shape = shape_of(base)
    one, two = (sum(value.numel() for value in MetaBase(base.config, RANK, layers).adapter) for layers in (1, 2))
    adapter = one + (shape.layers - 1) * (two - one)  # all layers are alike; the slow test counts them
    tables = 2 * RANK * (shape.vocabulary + shape.hidden) if shape.family in ("llama", "qwen3") else 0
    assert parts(shape, CARD, Workload(rank=RANK), TOKENS).sampler_adapters == 3 * 2 * (adapter + tables)


@each_family
def test_the_cache_of_a_token_is_transformers_own(base: PublishedBase) -> None:
    meta = MetaBase(base.config, RANK, layers=2)
    cache = DynamicCache()
    with torch.no_grad():
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
        meta.base.model(input_ids=ids, past_key_values=cache, use_cache=True)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in vars(layer).values() if torch.is_tensor(tensor))
    assert cache_per_token(shape_of(base, layers=2), Workload()) == held // TOKENS


@pytest.mark.parametrize("four_bit", [False, True])
@each_family
def test_what_a_layer_keeps_for_its_backward_pass_is_what_autograd_saves(base: PublishedBase, four_bit: bool) -> None:
    metas = [MetaBase(base.config, RANK, layers, sixteen_bits=not four_bit) for layers in (1, 2)]
    one, two = (meta.run(TOKENS, recompute=False).saved for meta in metas)
    shape = shape_of(base)
    adapter_copies = 0 if four_bit else 2 * shape.lora_parameters(RANK) // shape.layers
    assert layer_bytes(shape, RANK, four_bit=four_bit) * TOKENS == two - one - adapter_copies


@pytest.mark.parametrize("four_bit", [False, True])
@each_family
def test_the_activations_of_a_row_bound_its_peak_closely(base: PublishedBase, four_bit: bool) -> None:
    """The plan may ask for more than a row takes, by a tenth at most; never for less. In 4 bits the weight that is unpacked
    comes on top, which the meta device does not show."""
    for layers in (3, 6):
        shape = shape_of(base, layers)
        peak = MetaBase(base.config, RANK, layers, sixteen_bits=not four_bit).run(TOKENS, recompute=True).peak
        planned = parts(shape, CARD, Workload(rank=RANK, logits_chunk=1, four_bit=four_bit), TOKENS)
        unpacked = 2 * max(inputs * outputs for inputs, outputs in shape.linears) if four_bit else 0
        activations = planned.learner_activations - unpacked
        assert peak <= activations + planned.learner_gradients
        assert activations <= 1.1 * peak


@each_family
def test_a_prefill_of_vllms_size_takes_no_more_than_planned_even_with_unfused_layers(base: PublishedBase) -> None:
    meta = MetaBase(base.config, RANK, layers=2)
    with meta.model.disable_adapter():
        peak = meta.run(CARD.prefill_tokens, recompute=False, trains=False).peak
    assert peak <= parts(shape_of(base), CARD, Workload(max_batch=1024), TOKENS).sampler_activations


@pytest.mark.parametrize(("top_p", "top_k", "least"), [(1.0, 0, 0.6), (0.9, 20, 0.95)])
def test_logits_take_the_bytes_that_the_plan_counts(top_p: float, top_k: int, least: float) -> None:
    """Per logit of a chunk: with top-p and top-k all of them, without them fewer."""
    chunk, vocabulary = 64, 50_000
    settings = TargetSettings(
        np.zeros(chunk, np.int64),
        np.full(chunk, 0.7),
        np.full(chunk, top_p),
        np.full(chunk, top_k),
        np.zeros(chunk),
    )
    with torch.device("meta"):
        head = torch.nn.Linear(8, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        hidden = torch.empty(chunk, 8, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes({head.weight.untyped_storage()._cdata: 0}) as live:
        at = np.arange(chunk)
        target_logprobs(hidden, at, settings, at, head, chunk=chunk, head_trains=False)
    planned = LOGIT_BYTES * chunk * vocabulary
    assert least * planned <= live.peak <= 1.01 * planned


def test_four_bits_are_what_bitsandbytes_holds() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    shape = shape_of(published()[0], layers=1)
    weight = torch.randn(shape.intermediate, shape.hidden)
    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    held = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    whole, four = (learner_weights(shape, Workload(four_bit=bits)) for bits in (False, True))
    saved = (whole - four) / shape.linear_parameters
    assert 2 - saved == pytest.approx(held / weight.numel(), rel=1e-3)
