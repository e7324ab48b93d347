"""The tokens that a list of texts (`structured_outputs.choice`) allowed at every token of a sampled answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from offbook.base.server_options import EngineOptions
from offbook.engine.inference.chat.grammar import GrammarError, Grammars
from offbook.engine.inference.decoding.generation import NoAllowedToken
from offbook.engine.protocol import Sample

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
            bounds = EngineOptions.model_construct()
            self._grammars = Grammars(
                self._tokenizer(),
                self._end_ids(),
                self._vocabulary,
                max_string=bounds.max_string,
                max_items=bounds.max_items,
            )
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
