"""Sampler and learner keep the same tokens, and give them the same logprobs to the last bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from offbook.engine.learner.model.target_logprobs import target_logprobs
from offbook.engine.sampling import RowSettings, TargetSettings, excluded, processed_logprobs

VOCABULARY = 50
SETTINGS = [  # temperature, top_p, top_k, min_p
    (1.0, 1.0, 0, 0.0),
    (0.7, 0.9, 0, 0.0),
    (1.3, 1.0, 7, 0.0),
    (1.0, 1.0, 0, 0.1),
    (0.8, 0.6, 12, 0.02),
    (2.0, 0.95, 1, 0.3),
    (1.0, 0.5, 200, 0.0),
]


def scores() -> torch.Tensor:
    """Logits with ties at every height, one row per setting."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(len(SETTINGS), VOCABULARY, generator=draw) * 6).round() / 2


@pytest.mark.parametrize("chunk", [512, 33])
def test_the_sampler_and_the_learner_agree_to_the_last_bit(chunk: int) -> None:
    logits = scores()
    temperature, top_p, top_k, min_p = (torch.tensor(column) for column in zip(*SETTINGS, strict=True))
    sampled = processed_logprobs(logits, RowSettings(temperature, min_p, top_k, top_p))

    rows = np.repeat(np.arange(len(SETTINGS)), VOCABULARY)
    columns: list[Any] = [np.array(column)[rows] for column in zip(*SETTINGS, strict=True)]
    targets = TargetSettings(np.tile(np.arange(VOCABULARY), len(SETTINGS)), *columns)
    logprobs, _, kept = target_logprobs(
        logits, rows, targets, np.arange(len(rows)), lambda states: states, chunk=chunk, head_trains=False
    )
    assert torch.equal(kept, (sampled > -math.inf).flatten())
    assert torch.equal(logprobs[kept], sampled.flatten()[kept])
    assert 0 < int((~kept).sum()) < len(kept)


def test_the_filter_is_off_where_no_setting_is_on_and_keeps_ties_of_top_k() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    assert excluded(logits, RowSettings()) is None
    one = excluded(logits, RowSettings(top_k=torch.tensor([1])))
    assert one is not None and one.tolist() == [[True, False, True, False]]
    least = excluded(logits, RowSettings(min_p=torch.tensor([1.0]), top_p=torch.tensor([1e-9])))
    assert least is not None and int((~least).sum()) == 1  # the likeliest is always kept
