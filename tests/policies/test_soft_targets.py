import math
import random

import pytest
import torch

from policies.basics import basic_episode
from policies.episodes import Turn, episode
from policies.evaluate import load
from policies.probe_labels import LABELS
from policies.soft_targets import soft_targets
from policies.tokenizer import end_id, ids_of, template
from policies.train import FALLING, Batch, encode, grow, loss_of, padded


@pytest.fixture(scope="module")
def policy():
    model, tokenizer = load()
    grow(model, tokenizer, seed=0)
    tokenizer.chat_template = template()
    return model, tokenizer


def test_where_completions_part_every_next_token_has_its_share(policy):
    _, tokenizer = policy
    turn = Turn(("order<1>", "order<2>"), ("The answer is 7.",), call_share=0.5)
    written = [*ids_of(tokenizer, "order<2>"), end_id(tokenizer)]
    first, second = soft_targets(tokenizer, turn, written)
    assert (first[0], sorted(first[1].values())) == (0, [0.5, 0.5])
    assert {tokenizer.decode([token]): share for token, share in second[1].items()} == {"<1>": 0.5, "<2>": 0.5}


def test_one_right_completion_and_ids_that_are_none_are_no_choice(policy):
    _, tokenizer = policy
    alone = Turn(("order<1>", "order<2>"), ("no",), call_share=0.0)  # calls that are right and never drawn
    assert list(soft_targets(tokenizer, alone, [*ids_of(tokenizer, "no"), end_id(tokenizer)])) == []
    both = Turn(("order<1>", "order<2>"), (), call_share=1.0)
    assert list(soft_targets(tokenizer, both, ids_of(tokenizer, "order<2>"))) == []


@pytest.mark.parametrize("make", [basic_episode, episode])
def test_every_open_turn_of_an_episode_is_found(policy, make):
    _, tokenizer = policy
    for seed in range(150):
        drawn = make(random.Random(seed))
        encoded = encode(tokenizer, drawn)
        opened = [turn for turn in drawn.turns if sum(share > 0 for share in turn.shares().values()) > 1]
        assert len(encoded.soft_targets) >= len(opened)
        for place, shares in encoded.soft_targets.items():
            assert encoded.written[place] and encoded.ids[place] in shares
            assert math.isclose(sum(shares.values()), 1.0)


def test_the_loss_is_the_mean_over_the_completions_that_could_have_been_drawn(policy):
    model, tokenizer = policy
    turn = Turn(("order<1>", "order<2>", "order<3>"), (), call_share=1.0)
    probe = torch.nn.Linear(model.config.hidden_size, len(LABELS))

    def loss(text: str, soft: bool) -> float:
        prompt = ids_of(tokenizer, "has order 7 left?")
        drawn = episode(random.Random(1), kind="idle")
        encoded = encode(tokenizer, drawn)
        written = [*ids_of(tokenizer, text), end_id(tokenizer)]
        encoded.ids[:] = prompt + written
        encoded.written[:] = [False] * len(prompt) + [True] * len(written)
        encoded.labels[:] = [0] * len(encoded.ids)
        encoded.soft_targets.clear()
        if soft:
            encoded.soft_targets.update(
                {len(prompt) + at: shares for at, shares in soft_targets(tokenizer, turn, written)}
            )
        batch: Batch = padded([encoded], 0)
        with torch.no_grad():
            return float(loss_of(model, probe, FALLING, batch))

    one_by_one = [loss(text, soft=False) for text in turn.calls]
    each_soft = [loss(text, soft=True) for text in turn.calls]
    ends = [hard - soft for hard, soft in zip(one_by_one, each_soft, strict=True)]
    assert abs(sum(ends)) < 3e-4
    assert max(abs(end) for end in ends) > 1e-3
