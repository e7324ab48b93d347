"""The batch of a step: its targets (the sampled tokens to train), with settings, advantages and recorded logprobs, and the tokens that
a list of texts (`structured_outputs.choice`) allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from offbook.base.types import Sampling
from offbook.engine.inference.chat.grammar import GrammarError, Grammars
from offbook.engine.inference.decoding.generation import NoAllowedToken
from offbook.engine.protocol import JobTrajectory, Sample
from offbook.engine.token_tree import numbered

from ...sampling import TargetSettings
from .advantage import Advantages
from .render import RENDERED

Number = TypeVar("Number", bound=np.generic)
Groups = Sequence[Sequence[JobTrajectory]]


@dataclass(frozen=True)
class TrainBatch:
    """The targets of a step, numbered 0..N-1: the completion tokens of `samples`, in order. A row of training refers to
    its targets by these numbers.

    A call's weight scales its advantage. The policy gradient is linear in the advantage, so the weight scales the
    gradient of that call alone; it does not enter the divisors or the KL term. In a supervised batch all advantages are
    1, and the settings are temperature 1 without a filter or a constraint: the whole distribution is trained."""

    trajectories: tuple[str, ...]  # ids of the trained trajectories
    samples: tuple[Sample, ...]  # the trained calls, one sample per choice of a call
    settings: TargetSettings  # token ids and sampling settings, [N]
    trajectory: NDArray[np.int64]  # [N], index into `trajectories`
    call: NDArray[np.int64]  # [N], index into `samples`
    advantages: NDArray[np.float64]  # [N], advantage of the trajectory (or of the call) times the call's weight
    sampler: NDArray[np.float64]  # [N], recorded logprob in nats; NaN: not recorded, or `constrained`
    constrained: NDArray[np.bool_]  # [N]: the call was sampled under a constraint that is not in `settings`
    left_out: Counter[str]  # calls of trajectories with an advantage that are not in `samples`, by reason
    unused: int  # calls of trajectories with an advantage whose output the app discarded
    without_targets: tuple[str, ...]  # trajectories with an advantage, but without targets

    def __len__(self) -> int:
        return len(self.trajectory)

    @property
    def rendered_share(self) -> float:
        """Share of the trained calls that were rendered from messages. Undefined for a batch without calls."""
        return sum(sample.constrained == RENDERED for sample in self.samples) / len(self.samples)

    def minibatches(self, count: int) -> tuple[tuple[Sample, ...], ...]:
        """Assign trajectories to `count` minibatches round robin, so that every minibatch has a share of every group.

        Returns the samples of every minibatch; empty minibatches are left out."""
        owner = [int(self.trajectory[sample.offset]) % count for sample in self.samples]
        parts = (tuple(s for s, o in zip(self.samples, owner, strict=True) if o == m) for m in range(count))
        return tuple(samples for samples in parts if samples)


def make_batch(
    groups: Groups,
    advantages: Advantages,
    allowed: Callable[[Sample], Allowed | None] = lambda _: None,
    *,
    supervised: bool = False,
) -> TrainBatch:
    """Collect the targets of all trajectories that have an advantage.

    The completion tokens of a call are targets unless its weight is 0 or its temperature is 0. A call without targets
    counts in `left_out` and changes nothing else in the batch: later calls have its tokens in their own prompts.
    `allowed(sample)`: the tokens that its grammar allowed, if the learner knows it. Such a call is not `constrained`.
    `supervised`: how tokens were sampled does not matter, so calls at temperature 0 are targets too.

    Two rollouts, the first with two calls. Every completion token is a target with its trajectory's advantage:

    >>> from offbook.engine.learner.targets.advantage import group_advantages
    >>> def sample(prompt, completion):
    ...     return Sample.bare(np.array(prompt, np.int32), np.array(completion, np.int32))
    >>> first = JobTrajectory("traj-a", 1.0, (sample([1, 2], [3, 4]), sample([1, 2, 3, 4, 5], [6])))
    >>> second = JobTrajectory("traj-b", 0.0, (sample([1, 2], [7]),))
    >>> advantages = group_advantages([[first.reward, second.reward]], min_group_size=2, divide_by_std=False)
    >>> batch = make_batch([[first, second]], advantages)
    >>> batch.settings.token_ids.tolist(), batch.trajectory.tolist(), batch.call.tolist()
    ([3, 4, 6, 7], [0, 0, 0, 1], [0, 0, 1, 2])
    >>> batch.advantages.tolist()
    [0.5, 0.5, 0.5, -0.5]
    """
    trajectories, without = list[str](), list[str]()
    trained: list[tuple[int, float, Sample]] = []
    left_out, unused = Counter[str](), 0
    for group, values in zip(groups, advantages.of_calls, strict=True):
        for trajectory, of_calls in zip(group, values, strict=True):
            if of_calls is None:
                continue
            before = len(trained)
            left_out["not_trained"] += trajectory.left_out
            unused += sum(sample.unused for sample in trajectory.samples)
            for sample in trajectory.samples:
                if (reason := _why_not_trained(sample, supervised)) is None:
                    # Without call rewards `of_calls` has one entry, the trajectory's advantage.
                    advantage = of_calls[min(sample.earned_before, len(of_calls) - 1)]
                    sample = replace(sample, sampling=Sampling()) if supervised else sample
                    trained.append((len(trajectories), advantage * sample.weight, sample))
                else:
                    left_out[reason] += 1
            (without if len(trained) == before else trajectories).append(trajectory.id)
    batch = _as_batch(tuple(trajectories), trained, allowed, left_out, unused, tuple(without))
    return _without_sampling(batch) if supervised else batch


def _without_sampling(batch: TrainBatch) -> TrainBatch:
    """The batch without its recorded logprobs, and without calls under a constraint."""
    nothing = np.full_like(batch.sampler, np.nan)
    return replace(batch, sampler=nothing, constrained=np.zeros_like(batch.constrained))


def _why_not_trained(sample: Sample, supervised: bool) -> str | None:
    """Why the call's tokens are no targets, as a key of `TrainBatch.left_out`; None: they are targets."""
    if sample.weight == 0:
        return "excluded"
    if not len(sample.completion_ids):
        return "not_trained"
    return "greedy" if sample.sampling.temperature <= 0 and not supervised else None


def _as_batch(
    trajectories: tuple[str, ...],
    trained: Sequence[tuple[int, float, Sample]],
    allowed: Callable[[Sample], Allowed | None],
    left_out: Counter[str],
    unused: int,
    without: tuple[str, ...],
) -> TrainBatch:
    masks = [allowed(sample) for _, _, sample in trained]
    samples = numbered(
        [
            sample if tokens is None else replace(sample, constrained=None)
            for (_, _, sample), tokens in zip(trained, masks, strict=True)
        ]
    )
    lengths = np.array([len(sample.completion_ids) for sample in samples], np.int64)
    call = np.repeat(np.arange(len(samples)), lengths)

    def spread(values: Sequence[float], dtype: type[Number]) -> NDArray[Number]:
        return np.array(values, dtype)[call]

    def chain(arrays: Sequence[NDArray[np.generic]], dtype: type[Number]) -> NDArray[Number]:
        return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)

    recorded = chain([sample.logprobs for sample in samples], np.float64)
    unusable = spread([sample.constrained is not None for sample in samples], np.bool_)
    grammar, allowed_ids = _grammar(samples, masks)
    return TrainBatch(
        trajectories=trajectories,
        samples=samples,
        settings=TargetSettings(
            token_ids=chain([sample.completion_ids for sample in samples], np.int64),
            temperature=spread([sample.sampling.temperature for sample in samples], np.float64),
            top_p=spread([sample.sampling.top_p for sample in samples], np.float64),
            top_k=spread([sample.sampling.top_k for sample in samples], np.int64),
            min_p=spread([sample.sampling.min_p for sample in samples], np.float64),
            allowed=grammar,
            allowed_ids=allowed_ids,
        ),
        trajectory=spread([t for t, _, _ in trained], np.int64),
        call=call,
        advantages=spread([advantage for _, advantage, _ in trained], np.float64),
        sampler=np.where(unusable, np.nan, recorded),
        constrained=spread([sample.constrained not in (None, RENDERED) for sample in samples], np.bool_),
        left_out=left_out,
        unused=unused,
        without_targets=without,
    )


def _grammar(
    samples: Sequence[Sample], allowed: Sequence[Allowed | None]
) -> tuple[NDArray[np.int64] | None, tuple[NDArray[np.int64], ...]]:
    """`TargetSettings.allowed` and `allowed_ids`. Equal sets of tokens have one index."""
    if all(tokens is None for tokens in allowed):
        return None, ()
    numbers: dict[bytes, int] = {}
    sets: list[NDArray[np.int64]] = []
    places: list[int] = []
    for sample, tokens in zip(samples, allowed, strict=True):
        if tokens is None:
            places += [-1] * len(sample.completion_ids)
            continue
        for ids in tokens:
            place = numbers.setdefault(ids.tobytes(), len(sets))
            if place == len(sets):
                sets.append(ids)
            places.append(place)
    return np.array(places, np.int64), tuple(sets)


Allowed = tuple[NDArray[np.int64], ...]
"""Ascending token ids for every token of an answer."""
_CACHED = 10_000


class ChoiceMasks:
    """Computes them with the sampler's own grammar, for one base. The arguments are read when the first call has a list."""

    def __init__(
        self, tokenizer: Callable[[], PreTrainedTokenizerBase], end_ids: Callable[[], frozenset[int]], vocabulary: int
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocabulary = vocabulary
        self._grammars: Grammars | None = None
        self._cache: dict[tuple[tuple[str, ...], bytes], Allowed | None] = {}

    def __call__(self, sample: Sample) -> Allowed | None:
        """The allowed tokens for every token of the sample's completion; None without a list, or if the completion is
        not what the list allows, such as one with thoughts before the text."""
        if not sample.allowed_texts:
            return None
        key = (sample.allowed_texts, sample.completion_ids.tobytes())
        if key not in self._cache:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            self._cache[key] = self._compute(sample.allowed_texts, sample.completion_ids.tolist())
        return self._cache[key]

    def _compute(self, texts: Sequence[str], completion: Sequence[int]) -> Allowed | None:
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer(), self._end_ids(), self._vocabulary)
        allowed: list[NDArray[np.int64]] = []
        try:
            mask = self._grammars.one_of(texts)
            for token in completion:
                ids: NDArray[np.int64] = mask.apply(torch.zeros(self._vocabulary)).isfinite().nonzero()[:, 0].numpy()
                if token not in ids:
                    return None
                allowed.append(ids)
                mask.accept(token)
        except (GrammarError, NoAllowedToken):
            return None  # vLLM's grammar takes lists that ours does not
        return tuple(allowed)
