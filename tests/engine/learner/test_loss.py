"""Each loss against TRL 1.4 (values it computed), and against the published formulas through autograd."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbook.base.config import TrainConfig
from offbook.engine.learner.targets.advantage import group_advantages
from offbook.engine.learner.targets.batch import make_batch
from offbook.engine.learner.update.loss import (
    LOSSES,
    Clip,
    Targets,
    divisors,
    importance_weights,
    supervised_divisors,
)
from offbook.engine.learner.update.row_pass import LossInputs, Scores
from offbook.engine.protocol import JobTrajectory
from tests.engine.learner.jobs import sample

TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text("utf-8"))
NAMES = sorted(LOSSES)


def padded(rows: list[list[float]], mask: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)[mask]


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['loss']}-kl{case['kl_coef']}-cap{case['cap']}")
def test_a_loss_and_its_gradient_equal_trls(case: dict[str, Any]) -> None:
    lengths = torch.tensor(case["lengths"])
    mask = torch.arange(len(case["old"][0])) < lengths[:, None]
    trajectory = torch.arange(len(lengths)).repeat_interleave(lengths)
    old, sampler = padded(case["old"], mask), padded(case["sampler"], mask)
    targets = Targets(
        old=old,
        advantages=torch.tensor(case["advantages"], dtype=torch.float64)[trajectory],
        inverse_divisors=1 / divisors(case["loss"], trajectory, case["max_tokens"]),
        importance=importance_weights(old, sampler, case["cap"]),
        sequence=trajectory,
        base=padded(case["reference"], mask) if case["kl_coef"] else None,
    )
    clip = Clip(case["low"], case["high"], case["kl_coef"])
    gradient = LOSSES[case["loss"]](padded(case["current"], mask), targets, clip)
    assert float(gradient.value) == pytest.approx(case["value"], rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient.coefficients, padded(case["gradient"], mask), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_far_below_the_base_is_pulled_back_with_a_bounded_slope(name: str) -> None:
    """d = 2 has k3 = 4.4, d = 12 has 162,742. From d = 2.6 on, the term is the tangent there."""
    base = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    current = base - torch.tensor([2.0, 12.0], dtype=torch.float64)
    targets = Targets(
        old=current,
        advantages=torch.zeros(2, dtype=torch.float64),
        inverse_divisors=torch.ones(2, dtype=torch.float64),
        importance=torch.ones(2, dtype=torch.float64),
        sequence=torch.tensor([0, 1]),
        base=base,
    )
    output = LOSSES[name](current, targets, Clip(0.2, 0.2, kl_coef=0.5))
    steepest = math.exp(2.6) - 1
    assert float(output.value) == pytest.approx(0.5 * (math.exp(2) - 3 + math.exp(2.6) - 3.6 + steepest * 9.4))
    slopes = torch.tensor([1 - math.exp(2), -steepest], dtype=torch.float64)
    torch.testing.assert_close(output.coefficients, 0.5 * slopes)
    assert output.kl is not None and float(output.kl[1]) == pytest.approx(math.exp(12) - 13)


def test_the_reference_values_come_from_trl_1_4_and_touch_every_branch() -> None:
    assert TRL["trl"] == "1.4.0"
    assert {case["loss"] for case in TRL["cases"]} | {"cross_entropy"} == set(NAMES)  # that one: test_supervised.py
    assert {case["cap"] for case in TRL["cases"]} == {None, 1.2}
    for case in TRL["cases"]:
        ratios = torch.tensor(case["current"]).sub(torch.tensor(case["old"])).exp()
        assert (ratios > 1 + case["high"]).any(), f"{case['loss']} is never clipped"


# ---- the published formulas, written again on padded [B, T] tensors, differentiated by autograd


def published(name: str, x: dict[str, Tensor], low: float, high: float, kl: float, cap: float | None) -> Tensor:
    """Rows of x are trajectories; `calls` [B, T] numbers the calls inside one. Returns the loss."""
    mask, now, old = x["mask"], x["now"], x["old"]
    advantage = x["advantage"][:, None]
    log_ratio = (now - old) * mask
    if name.startswith("gspo"):
        ratio = torch.zeros_like(now)
        calls = x["calls"] if name == "gspo-call" else torch.zeros_like(x["calls"])
        for call in calls.unique():
            here = (calls == call) * mask
            mean = (log_ratio * here).sum(1, keepdim=True) / here.sum(1, keepdim=True).clamp(min=1)
            ratio = ratio + here * mean.exp()
    else:
        ratio = log_ratio.exp()
    if name == "cross_entropy":
        term = -advantage * now
    elif name == "cispo":
        term = -ratio.clamp(max=1 + high).detach() * advantage * now
    else:
        term = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if cap is not None and name != "cross_entropy":
        term = term * (old - x["sampler"]).exp().clamp(max=cap).detach()
    difference = x["reference"] - now
    term = (term + kl * (difference.exp() - difference - 1)) * mask
    lengths = mask.sum(1)
    if name in ("dapo", "cispo", "cross_entropy"):
        return term.sum() / mask.sum()
    if name == "dr_grpo":
        return term.sum() / (len(mask) * 9)
    return (term.sum(1) / lengths).mean()


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from([*NAMES, "gspo-call"]),
    seed=st.integers(0, 10_000),
    kl=st.sampled_from([0.0, 0.3]),
    cap=st.sampled_from([None, 1.1]),
    high=st.sampled_from([0.1, 0.5]),
)
def test_a_loss_and_its_gradient_equal_the_published_formula(
    name: str, seed: int, kl: float, cap: float | None, high: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, length = 4, 6

    def normal(scale: float, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    old = normal(1, rows, length) - 3
    x = {
        "mask": mask.double(),
        "old": old,
        "now": (old + normal(0.4, rows, length)).requires_grad_(),
        "sampler": old + normal(0.3, rows, length),
        "reference": old + normal(0.3, rows, length),
        "advantage": normal(1, rows),
        "calls": torch.randint(0, 3, (rows, length), generator=generator),
    }
    expected = published(name, x, 0.15, high, kl, cap)
    expected.backward()
    trajectory = torch.arange(rows).repeat_interleave(lengths)
    key = name.removesuffix("-call")
    targets = Targets(
        old=old[mask],
        advantages=x["advantage"][trajectory],
        inverse_divisors=1
        / (
            supervised_divisors(trajectory, trajectory, "tokens")
            if key == "cross_entropy"
            else divisors(key, trajectory, 9)
        ),
        importance=importance_weights(old[mask], x["sampler"][mask], cap),
        sequence=trajectory * 3 + x["calls"][mask] if name == "gspo-call" else trajectory,
        base=x["reference"][mask] if kl else None,
    )
    gradient = LOSSES[key](x["now"].detach()[mask], targets, Clip(0.15, high, kl))
    torch.testing.assert_close(gradient.value, expected.detach(), rtol=1e-9, atol=1e-12)
    assert x["now"].grad is not None
    torch.testing.assert_close(gradient.coefficients, x["now"].grad[mask], rtol=1e-9, atol=1e-12)


# ---- parts


def test_denominators_of_two_trajectories_with_three_and_one_tokens() -> None:
    trajectory = torch.tensor([0, 0, 0, 1])
    assert divisors("grpo", trajectory, 5).tolist() == [6, 6, 6, 2]
    assert divisors("gspo", trajectory, 5).tolist() == [6, 6, 6, 2]
    assert divisors("dapo", trajectory, 5).tolist() == [4, 4, 4, 4]
    assert divisors("cispo", trajectory, 5).tolist() == [4, 4, 4, 4]
    assert divisors("dr_grpo", trajectory, 5).tolist() == [10, 10, 10, 10]


def test_supervised_divisors_count_tokens_messages_or_trajectories_or_are_given() -> None:
    call, trajectory = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
    assert supervised_divisors(call, trajectory, "tokens").tolist() == [5] * 5
    assert supervised_divisors(call, trajectory, "messages").tolist() == [9, 9, 9, 3, 3]
    assert supervised_divisors(call, trajectory, "trajectories").tolist() == [8, 8, 8, 8, 2]
    assert supervised_divisors(call, trajectory, 2.5).tolist() == [2.5] * 5


def test_a_trajectory_without_sampled_tokens_is_no_part_of_the_mean() -> None:
    assert divisors("grpo", torch.tensor([0, 2]), 5).tolist() == [2, 2]


def test_the_importance_weight_is_truncated_and_one_where_the_sampler_gave_no_logprob() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    sampler = torch.tensor([-1.0 - torch.log(torch.tensor(3.0)).item(), -0.5, float("nan")], dtype=torch.float64)
    weights = importance_weights(old, sampler, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.6065306597126334, 1.0], rel=1e-12)
    assert importance_weights(old, sampler, None).tolist() == [1.0, 1.0, 1.0]


def test_a_gspo_token_has_its_own_advantage_and_its_sequences_mean_importance_weight() -> None:
    advantages = torch.tensor([1.0, 1.0, -0.5, 2.0], dtype=torch.float64)
    importance = torch.tensor([0.5, 1.0, 1.5, 0.8], dtype=torch.float64)
    old, sequence = torch.full_like(advantages, -2.0), torch.tensor([0, 0, 0, 1])
    targets = Targets(old, advantages, 1 / divisors("gspo", sequence, 9), importance, sequence)
    gradient = LOSSES["gspo"](old + 0.1, targets, Clip(0.2, 0.2))
    mean = torch.tensor([1.0, 1.0, 1.0, 0.8], dtype=torch.float64)
    expected = -mean * math.exp(0.1) * advantages / divisors("gspo", sequence, 9)
    torch.testing.assert_close(gradient.coefficients, expected, rtol=1e-12, atol=0)


def test_a_constrained_call_is_no_part_of_a_trajectorys_ratio_and_never_clipped() -> None:
    mixed = (sample("free", [1, 2], [3, 4]), sample("forced", [1, 2, 3, 4, 5], [6, 7], constrained="tool_choice"))
    group = [JobTrajectory("a", 1.0, mixed), JobTrajectory("b", 0.0, (sample("other", [1, 2], [8]),))]
    batch = make_batch([group], group_advantages([[1.0, 0.0]], min_group_size=2, divide_by_std=False))
    inputs = LossInputs.of(batch, TrainConfig(loss="gspo", importance_cap=None), 1, None)
    old = Scores.empty(5)
    old.logprobs.fill_(-1.0)
    for change, clipped in ((0.1, False), (0.3, True)):
        now = torch.tensor([-1 + change] * 4 + [-1.0], dtype=torch.float64)
        output, _ = inputs.loss(torch.arange(5), now, old, None)
        free = 0.0 if clipped else -math.exp(change) * 0.5 / 8
        assert output.coefficients.tolist() == pytest.approx([free, free, -0.5 / 8, -0.5 / 8, 0.5 / 2])
        assert output.clipped.tolist() == [clipped, clipped, False, False, False]


def test_a_clipped_token_has_no_gradient_in_grpo_and_keeps_one_in_cispo() -> None:
    one = torch.ones(1, dtype=torch.float64)
    targets = Targets(
        old=-2 * one, advantages=one, inverse_divisors=one, importance=one, sequence=torch.zeros(1, dtype=torch.int64)
    )
    now = torch.tensor([-1.0], dtype=torch.float64)  # ratio e
    clipped = LOSSES["grpo"](now, targets, Clip(0.2, 0.2))
    assert clipped.coefficients.tolist() == [0.0]
    assert clipped.clipped.tolist() == [True]
    assert float(clipped.value) == pytest.approx(-1.2)
    kept = LOSSES["cispo"](now, targets, Clip(0.2, 0.2))
    assert kept.coefficients.tolist() == pytest.approx([-1.2])
    assert kept.clipped.tolist() == [True]


def test_a_base_without_the_token_adds_no_kl() -> None:
    one = torch.ones(2, dtype=torch.float64)
    reference = torch.tensor([float("nan"), -1.0], dtype=torch.float64)
    targets = Targets(-one, 0 * one, one, one, torch.zeros(2, dtype=torch.int64), reference)
    gradient = LOSSES["grpo"](-2 * one, targets, Clip(0.2, 0.2, 1.0))
    e = 2.718281828459045
    assert gradient.coefficients.tolist() == pytest.approx([0.0, 1 - e], abs=1e-12)
    assert float(gradient.value) == pytest.approx(e - 2)
    assert gradient.kl is not None
    assert gradient.kl.tolist() == pytest.approx([0.0, e - 2])


def test_losses_of_no_targets_are_zero() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    targets = Targets(none, none, none, none, torch.zeros(0, dtype=torch.int64), none)
    for name in NAMES:
        gradient = LOSSES[name](none, targets, Clip(0.2, 0.2, 0.1))
        assert (float(gradient.value), len(gradient.coefficients)) == (0.0, 0)
