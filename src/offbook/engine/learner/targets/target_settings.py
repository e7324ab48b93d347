"""The sampling settings of the targets. Imports nothing but numpy, as benchmarks on bare GPU machines need it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TargetSettings:
    """The sampled token of every target of the step, and the sampling settings of its call; arrays [N].

    top_p 1, top_k 0 and min_p 0 mean off. A target at temperature 0 is never in the kept set. `allowed[i]` is the index
    in `allowed_ids` of the token ids that a grammar allowed there, -1 for all; None: all targets are free.
    """

    token_ids: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]
    allowed: NDArray[np.int64] | None = None
    allowed_ids: tuple[NDArray[np.int64], ...] = ()

    @classmethod
    def none(cls) -> TargetSettings:
        """The settings of no targets."""
        integers, reals = np.zeros(0, np.int64), np.zeros(0)
        return cls(integers, reals, reals, integers, reals)

    def take(self, index: NDArray[np.int64]) -> TargetSettings:
        """The targets at these indexes."""
        return replace(
            self,
            token_ids=self.token_ids[index],
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            allowed=None if self.allowed is None else self.allowed[index],
        )

    def keys(self, predictors: NDArray[np.int64]) -> NDArray[np.int64]:
        """One column per target, int64 [6 or 7, N]. Equal columns have equal logprobs; floats are compared by their
        bits."""
        reals = (values.view(np.int64) for values in (self.temperature, self.top_p, self.min_p))
        grammar = () if self.allowed is None else (self.allowed,)
        return np.stack([predictors, self.token_ids, self.top_k, *reals, *grammar])
