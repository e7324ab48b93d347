"""Sampling through the scheduler: agreement with plain transformers, batching, seeds, ends, failures."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM

from offbook.engine.inference.decoding import batch as batches
from offbook.engine.inference.decoding.adapters import Adapter, load_adapter
from offbook.engine.inference.decoding.generation import Decoder, Generation, StopDetector
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import Engine, call, plain_logits, prompt


def kept_logprobs(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Processed logprobs of one row in float64, written from the definitions (vLLM's order: min-p, top-k, top-p)."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    scaled = np.where(probabilities < min_p, -np.inf, scaled)
    order = np.argsort(-scaled)
    if top_k:
        scaled[order[top_k:]] = -np.inf
    weights = np.exp(scaled[order] - scaled[order[0]])
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    scaled[order[1:][before[1:] >= top_p]] = -np.inf
    top = scaled.max()
    return scaled - top - math.log(np.exp(scaled - top).sum())


def test_greedy_completions_equal_those_of_generate(
    engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM
) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 17, 40, 40, 5, 61))]
    sampled = engine.sample(*[call(policy, ids, temperature=0.0, max_tokens=20) for ids in prompts])
    for ids, one in zip(prompts, sampled, strict=True):
        expected = plain.generate(  # type: ignore[attr-defined]  # its protocol names attributes that no model declares
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=None,
        )
        assert one.ids == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (9, 0.9, 0.02)]
)
@pytest.mark.parametrize("lora", [None, 0])
def test_logprobs_are_those_of_the_processed_distribution(
    engine: Engine,
    policy: ModelRunner,
    plain: Qwen2ForCausalLM,
    plain_adapted: list[PeftModel],
    adapters: list[Adapter],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    lora: int | None,
) -> None:
    adapter = None if lora is None else adapters[lora]
    reference = plain if lora is None else plain_adapted[lora]
    calls = [
        call(
            policy,
            prompt(seed, 4 + 9 * seed),
            adapter,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=(seed,),
        )
        for seed in range(4)
    ]
    for one, sampled in zip(calls, engine.sample(*calls), strict=True):
        rows = plain_logits(reference, one.prompt_ids, sampled.ids).numpy()
        expected = [
            kept_logprobs(row, temperature, top_k, top_p, min_p)[token]
            for row, token in zip(rows, sampled.ids, strict=True)
        ]
        assert np.abs(np.array(sampled.logprobs) - np.array(expected)).max() < 1e-5


def test_greedy_logprobs_are_those_of_the_raw_distribution(
    engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM
) -> None:
    one = call(policy, prompt(1, 9), temperature=0.0, top_k=2, top_p=0.1)
    (sampled,) = engine.sample(one)
    rows = plain_logits(plain, one.prompt_ids, sampled.ids)
    assert sampled.ids == rows.argmax(-1).tolist()
    expected = rows.log_softmax(-1).max(-1).values
    assert torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)


def test_calls_with_different_settings_and_lengths_share_a_batch(
    engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM
) -> None:
    greedy = call(policy, prompt(1, 30), temperature=0.0, max_tokens=25)
    others = [
        call(policy, prompt(2, 7), temperature=1.3, top_k=3, max_tokens=4),
        call(policy, prompt(3, 50), top_p=0.5, max_tokens=40),
        call(policy, prompt(4, 1), min_p=0.3, max_tokens=1),
    ]
    alone = engine.sample(call(policy, prompt(1, 30), temperature=0.0, max_tokens=25))[0]
    together = engine.sample(greedy, *others)
    assert together[0].ids == alone.ids
    assert [len(one.ids) for one in together] == [25, 4, 40, 1]
    assert all(one.last.finish == "length" for one in together)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(engine: Engine, policy: ModelRunner) -> None:
    def seeded() -> Generation:
        return call(policy, prompt(1, 20), seed=(7, 0), max_tokens=150)

    (alone,) = engine.sample(seeded())
    crowd = [call(policy, prompt(seed, seed), max_tokens=5 + 3 * seed) for seed in range(1, 30)]
    assert engine.sample(*crowd[:10], seeded(), *crowd[10:])[10].ids == alone.ids
    (other,) = engine.sample(call(policy, prompt(1, 20), seed=(8, 0), max_tokens=150))
    assert other.ids != alone.ids


def test_sampled_tokens_follow_the_distribution(engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM) -> None:
    ids = prompt(11, 8)
    count = 2000
    sampled = engine.sample(*[call(policy, ids, max_tokens=1, seed=(at,)) for at in range(count)])
    seen = Counter(one.ids[0] for one in sampled)
    expected = plain_logits(plain, ids, [0])[0].softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(seen[token] - count * probability) <= 5 * spread + 1


def test_equal_prompts_and_shared_beginnings_change_nothing(
    policy: ModelRunner, plain: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(batches.PREFILL_TOKENS, "cpu", 24)  # so that long prompts take several passes
    engine = Engine(policy)
    system = prompt(0, 70)
    prompts = [system + prompt(seed, 3 + seed) for seed in (1, 2, 3)]
    first = [call(policy, ids, temperature=0.0) for ids in prompts for _ in range(3)]
    turns = list(zip(first, engine.sample(*first), strict=True))
    second = [call(policy, (*one.prompt_ids, *sampled.ids, *prompt(9, 6)), temperature=0.0) for one, sampled in turns]
    turns += zip(second, engine.sample(*second), strict=True)
    engine.scheduler.close()
    for one, sampled in turns:
        rows = plain_logits(plain, one.prompt_ids, sampled.ids)
        assert sampled.ids == rows.argmax(-1).tolist()
        expected = rows.log_softmax(-1).max(-1).values
        assert torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)


def test_calls_enter_while_others_are_sampled(engine: Engine, policy: ModelRunner) -> None:
    long = call(policy, prompt(1, 10), temperature=0.0, max_tokens=300, streamed=True)
    engine.submit(long)
    engine.wait_for_tokens(long, 3)
    (short,) = engine.sample(call(policy, prompt(2, 10), max_tokens=2))
    assert len(short.ids) == 2
    assert len(engine.wait(long)[0].ids) == 300


def test_more_calls_than_slots_are_all_answered(policy: ModelRunner) -> None:
    engine = Engine(policy, max_batch=3)
    sampled = engine.sample(*[call(policy, prompt(seed, 5 + seed), max_tokens=3 + seed % 4) for seed in range(20)])
    engine.scheduler.close()
    assert [len(one.ids) for one in sampled] == [3 + seed % 4 for seed in range(20)]


def test_adapters_take_turns_and_never_mix(
    engine: Engine,
    policy: ModelRunner,
    plain: Qwen2ForCausalLM,
    plain_adapted: list[PeftModel],
    adapters: list[Adapter],
) -> None:
    ids = prompt(5, 25)
    worn = [None, *adapters] * 3
    calls = [call(policy, ids, adapter, temperature=0.0, max_tokens=30) for adapter in worn]
    references = {None: plain, adapters[0]: plain_adapted[0], adapters[1]: plain_adapted[1]}
    completions: set[tuple[int, ...]] = set()
    for one, sampled in zip(calls, engine.sample(*calls), strict=True):
        rows = plain_logits(references[one.adapter], ids, sampled.ids)
        expected = rows.log_softmax(-1).max(-1).values
        assert sampled.ids == rows.argmax(-1).tolist()
        assert torch.allclose(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)
        completions.add(tuple(sampled.ids))
    assert len(completions) == 3  # the adapters do differ


def test_many_steps_in_a_row_keep_the_memory_of_few(
    engine: Engine, policy: ModelRunner, adapter_folders: list[Path]
) -> None:
    batches_made: list[weakref.ref[batches.RunningBatch]] = []
    made = batches.RunningBatch.__init__

    def noted(self: batches.RunningBatch, given: ModelRunner) -> None:
        batches_made.append(weakref.ref(self))
        made(self, given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches.RunningBatch, "__init__", noted)
        for step in range(6):
            adapter = load_adapter(f"m@{step}", adapter_folders[0], policy.layers)
            engine.sample(call(policy, prompt(step, 20), adapter, max_tokens=2))
    gc.collect()
    assert len(batches_made) == 6
    assert sum(made() is not None for made in batches_made) <= 3


def test_a_short_call_of_another_adapter_does_not_wait_for_a_long_one(
    engine: Engine, policy: ModelRunner, adapters: list[Adapter]
) -> None:
    long = call(policy, prompt(1, 10), adapters[0], max_tokens=450, streamed=True)
    engine.submit(long)
    engine.wait_for_tokens(long, 2)
    engine.sample(call(policy, prompt(2, 10), adapters[1], max_tokens=2))
    assert engine.scheduler.running == 1
    engine.scheduler.cancel([long])


def test_the_base_is_bit_for_bit_what_it_was_after_adapters_were_worn(
    engine: Engine, policy: ModelRunner, adapters: list[Adapter]
) -> None:
    engine.sample(call(policy, prompt(1, 5)))
    before = {name: layer.weight.clone() for name, layer in policy.layers.items()}
    engine.sample(call(policy, prompt(1, 5), adapters[0]), call(policy, prompt(1, 5), adapters[1]))
    engine.sample(call(policy, prompt(1, 5)))
    assert all(torch.equal(layer.weight, before[name]) for name, layer in policy.layers.items())


def test_the_end_token_is_among_the_ids_with_its_logprob(
    engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM
) -> None:
    (eos,) = policy.eos
    one = call(policy, prompt(1, 9), ignore_eos=False, logit_bias=((eos, 100.0),), max_tokens=50)
    (sampled,) = engine.sample(one)
    assert sampled.ids == [eos]
    assert sampled.last.finish == "stop"
    assert sampled.last.stop_reason is None
    assert len(sampled.logprobs) == 1


def test_ignore_eos_goes_on_and_min_tokens_bans_the_end(engine: Engine, policy: ModelRunner) -> None:
    (eos,) = policy.eos
    bias = ((eos, 100.0),)
    going, late = engine.sample(
        call(policy, prompt(1, 9), logit_bias=bias, max_tokens=6),
        call(policy, prompt(1, 9), logit_bias=bias, max_tokens=6, ignore_eos=False, min_tokens=4),
    )
    assert going.ids == [eos] * 6
    assert len(late.ids) == 5
    assert late.ids.index(eos) == 4


def test_a_stop_token_id_ends_it_and_is_named(engine: Engine, policy: ModelRunner) -> None:
    (sampled,) = engine.sample(
        call(policy, prompt(1, 9), logit_bias=((77, 100.0),), stop_token_ids=(77,), ignore_eos=False)
    )
    assert (sampled.ids, sampled.last.finish, sampled.last.stop_reason) == ([77], "stop", 77)


def test_a_stop_string_ends_it_where_it_is_complete(engine: Engine, policy: ModelRunner) -> None:
    decoder = Decoder(policy.tokenizer)
    (free,) = engine.sample(call(policy, prompt(1, 9), temperature=0.0, max_tokens=20))
    text = decoder.decode(free.ids[4:6])
    one = call(policy, prompt(1, 9), temperature=0.0, max_tokens=20)
    one.stop_detector = StopDetector(decoder, [text])
    (sampled,) = engine.sample(one)
    assert sampled.last.stop_reason == text
    assert sampled.last.finish == "stop"
    assert sampled.ids == free.ids[: len(sampled.ids)]
    assert text in decoder.decode(sampled.ids)
    assert text not in decoder.decode(sampled.ids[:-1])


def test_penalties_follow_their_definitions(engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM) -> None:
    one = call(
        policy,
        prompt(3, 12),
        temperature=0.0,
        repetition_penalty=1.7,
        frequency_penalty=0.9,
        presence_penalty=0.4,
        max_tokens=30,
    )
    (sampled,) = engine.sample(one)
    rows = plain_logits(plain, one.prompt_ids, sampled.ids).double().numpy()
    for at, row in enumerate(rows):
        counts = Counter(sampled.ids[:at])
        for token in {*one.prompt_ids, *counts}:
            row[token] = row[token] / 1.7 if row[token] > 0 else row[token] * 1.7
        for token, count in counts.items():
            row[token] -= 0.9 * count + 0.4
        assert sampled.ids[at] == row.argmax()


def test_top_logprobs_are_the_likeliest_in_order(engine: Engine, policy: ModelRunner, plain: Qwen2ForCausalLM) -> None:
    one = call(policy, prompt(3, 12), temperature=0.8, top_logprobs=5)
    (sampled,) = engine.sample(one)
    expected = (plain_logits(plain, one.prompt_ids, sampled.ids) / 0.8).log_softmax(-1).topk(5)
    for best, ids, values in zip(sampled.last.top, expected.indices.tolist(), expected.values.tolist(), strict=True):
        assert [token for token, _ in best] == ids
        assert [logprob for _, logprob in best] == pytest.approx(values, abs=1e-5)


def test_a_streamed_call_gives_the_same_as_a_whole_one(engine: Engine, policy: ModelRunner) -> None:
    whole = call(policy, prompt(1, 20), seed=(3,), max_tokens=30)
    streamed = call(policy, prompt(1, 20), seed=(3,), max_tokens=30, streamed=True)
    one, other = engine.sample(whole, streamed)
    assert (one.ids, one.logprobs) == (other.ids, pytest.approx(other.logprobs, abs=1e-6))
    assert (len(one.updates), len(other.updates)) == (1, 30)
