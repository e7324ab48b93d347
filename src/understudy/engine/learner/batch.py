"""The batch of a step: which sampled tokens are targets, with their settings, advantages and recorded logprobs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..protocol import JobTrajectory, Sample
from ..token_tree import numbered
from .advantage import Advantages
from .target_logprobs import TargetSettings

Number = TypeVar("Number", bound=np.generic)
Groups = Sequence[Sequence[JobTrajectory]]


@dataclass(frozen=True)
class TrainBatch:
    """The targets of a step, numbered 0..N-1: trained samples in order, their completion tokens in order.

    `samples[c]` is trained call c; arrays are [N]: `trajectory` indexes `trajectories`, `call` indexes `samples`,
    `sampler` is the recorded logprob, NaN where it cannot be used (none given, or the call was constrained).
    `advantages` is the advantage of the trajectory (or the call) times the weight of the call: the policy gradient is linear in it, so the
    weight scales the gradient of that call alone. It is no part of any denominator, nor of the KL term.
    """

    trajectories: tuple[str, ...]
    samples: tuple[Sample, ...]
    settings: TargetSettings
    trajectory: NDArray[np.int64]
    call: NDArray[np.int64]
    advantages: NDArray[np.float64]
    sampler: NDArray[np.float64]
    left_out: Counter[str]  # why calls of trained trajectories are context only: excluded, greedy, not_trained
    unused: int  # calls of trajectories with an advantage whose output the app threw away
    without_targets: tuple[str, ...]  # trajectories with an advantage and nothing to train

    def __len__(self) -> int:
        return len(self.trajectory)

    def minibatches(self, count: int) -> tuple[tuple[Sample, ...], ...]:
        """The samples dealt by trajectory, one after another, so that each gets a like part of every group; never an empty
        one."""
        owner = [int(self.trajectory[sample.offset]) % count for sample in self.samples]
        dealt = (tuple(s for s, o in zip(self.samples, owner, strict=True) if o == m) for m in range(count))
        return tuple(samples for samples in dealt if samples)


def make_batch(groups: Groups, advantages: Advantages) -> TrainBatch:
    """The targets of every trajectory that has an advantage. A call of weight 0 is none, and counts nowhere but in
    `left_out`: the batch is the one that it would be without the call."""
    trajectories: list[str] = []
    without: list[str] = []
    left_out: Counter[str] = Counter()
    kept: list[tuple[int, float, Sample]] = []
    unused = 0
    for group, values in zip(groups, advantages.of_calls, strict=True):
        for trajectory, of_calls in zip(group, values, strict=True):
            if of_calls is None:
                continue
            before = len(kept)
            left_out["not_trained"] += trajectory.left_out
            unused += sum(sample.unused for sample in trajectory.samples)
            for sample in trajectory.samples:
                reason = _context_only(sample)
                if reason is None:
                    advantage = of_calls[min(sample.earned_before, len(of_calls) - 1)]
                    kept.append((len(trajectories), advantage * sample.weight, sample))
                else:
                    left_out[reason] += 1
            if len(kept) == before:
                without.append(trajectory.id)
            else:
                trajectories.append(trajectory.id)
    return _joined(tuple(trajectories), kept, left_out, unused, tuple(without))


def _context_only(sample: Sample) -> str | None:
    """Why none of the call's tokens is a target; None when they are."""
    if sample.weight == 0:
        return "excluded"
    if not len(sample.completion_ids):
        return "not_trained"
    return "greedy" if sample.sampling.temperature <= 0 else None


def _joined(
    trajectories: tuple[str, ...],
    kept: Sequence[tuple[int, float, Sample]],
    left_out: Counter[str],
    unused: int,
    without: tuple[str, ...],
) -> TrainBatch:
    samples = numbered([sample for _, _, sample in kept])
    lengths = np.array([len(sample.completion_ids) for sample in samples], np.int64)
    call = np.repeat(np.arange(len(samples)), lengths)

    def spread(values: Sequence[float], dtype: type[Number]) -> NDArray[Number]:
        return np.array(values, dtype)[call]

    def chain(arrays: Sequence[NDArray[np.generic]], dtype: type[Number]) -> NDArray[Number]:
        return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)

    recorded = chain([sample.logprobs for sample in samples], np.float64)
    constrained = spread([sample.constrained is not None for sample in samples], np.bool_)
    return TrainBatch(
        trajectories=trajectories,
        samples=samples,
        settings=TargetSettings(
            token_ids=chain([sample.completion_ids for sample in samples], np.int64),
            temperature=spread([sample.sampling.temperature for sample in samples], np.float64),
            top_p=spread([sample.sampling.top_p for sample in samples], np.float64),
            top_k=spread([sample.sampling.top_k for sample in samples], np.int64),
            min_p=spread([sample.sampling.min_p for sample in samples], np.float64),
        ),
        trajectory=spread([t for t, _, _ in kept], np.int64),
        call=call,
        advantages=spread([advantage for _, advantage, _ in kept], np.float64),
        sampler=np.where(constrained, np.nan, recorded),
        left_out=left_out,
        unused=unused,
        without_targets=without,
    )
