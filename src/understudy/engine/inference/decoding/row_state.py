"""The sampling state of a batch: tensors with one entry per row."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# numpy's and torch's constructors are only partly typed.

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .generation import Generation

_CHUNK = 128  # random numbers that are generated at once


class Uniforms:
    """The random numbers of one generation, from a counter-based generator (Philox).

    A seed gives the same numbers whatever else is in the batch.
    """

    def __init__(self, seed: tuple[int, ...] | None) -> None:
        entropy = seed if seed is not None else secrets.randbits(128)
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    def chunk(self) -> Tensor:
        """The next numbers in [0, 1): float64 [_CHUNK]."""
        return torch.from_numpy(self._generator.random(_CHUNK))


@dataclass(frozen=True)
class SamplingMetadata:
    """The settings of `sampling.processed_logprobs`, per row; None if no row uses a setting."""

    temperature: Tensor
    greedy: Tensor | None
    min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None


_FIELDS = ("tokens", "lengths", "counts", "limits", "minimum", "ends", "uniforms", "ids", "logprobs", "settings")


class Rows:
    """The state of B rows; row i samples `generations[i]`. `append` adds rows at the end, `keep` removes rows.

    Per row: tokens, the last sampled token; lengths, tokens in the cache; counts, tokens sampled so far; limits and
    minimum, the most and the fewest tokens to sample; ends [B, E], end tokens, padded with -1; ids, logprobs [B, T], all
    sampled tokens; settings [B, 5]: temperature, greedy, min_p, top_k, top_p. Settings and uniforms are float64, or float32
    on devices without float64.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._real = torch.float32 if device.type == "mps" else torch.float64
        self.generations: list[Generation] = []
        self.streams: list[Uniforms] = []
        whole = torch.zeros(0, dtype=torch.int64, device=device)
        self.tokens, self.lengths, self.counts, self.limits, self.minimum = whole, whole, whole, whole, whole
        self.ends = whole.view(0, 1)
        self.ids = whole.view(0, 1)
        self.logprobs = torch.zeros(0, 1, device=device)
        self.uniforms = torch.zeros(0, _CHUNK, dtype=self._real, device=device)
        self.settings = torch.zeros(0, 5, dtype=self._real, device=device)
        self._describe()

    def __len__(self) -> int:
        return len(self.generations)

    def append(self, generations: Sequence[Generation], max_length: int) -> None:
        """Add rows whose prompts are in the cache. A row has at most `max_length` tokens of prompt and completion."""
        streams = [Uniforms(generation.settings.seed) for generation in generations]
        ends = [sorted(generation.end_ids) for generation in generations]
        width = max(self.ends.shape[1], *(len(end) for end in ends))
        prompts = [len(generation.prompt_ids) for generation in generations]
        settings = [generation.settings for generation in generations]
        limits = [
            min(setting.max_tokens, max_length - prompt) for setting, prompt in zip(settings, prompts, strict=True)
        ]
        zeros = [0] * len(generations)
        self.tokens = self._joined(self.tokens, zeros)
        self.lengths = self._joined(self.lengths, prompts)
        self.counts = self._joined(self.counts, zeros)
        self.limits = self._joined(self.limits, limits)
        self.minimum = self._joined(self.minimum, [setting.min_tokens for setting in settings])
        padded = [[*end, *[-1] * (width - len(end))] for end in ends]
        self.ends = torch.cat(
            [_widened(self.ends, width, -1), torch.tensor(padded, device=self._device).view(-1, width)]
        )
        shapes = [
            (1.0, 1.0, 0.0, 0.0, 1.0)
            if setting.greedy
            else (setting.temperature, 0.0, setting.min_p, setting.top_k, setting.top_p)
            for setting in settings
        ]
        self.settings = torch.cat([self.settings, torch.tensor(shapes, dtype=self._real, device=self._device)])
        fresh = torch.stack([stream.chunk() for stream in streams]).to(self._real).to(self._device)
        self.uniforms = torch.cat([self.uniforms, fresh])
        span = self.ids.shape[1]
        self.ids = torch.cat([self.ids, self.ids.new_zeros(len(generations), span)])
        self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(len(generations), span)])
        self.generations += generations
        self.streams += streams
        self._describe()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows in `order`, in that order, and remove all others."""
        index = torch.tensor(order, dtype=torch.int64, device=self._device)
        for name in _FIELDS:
            setattr(self, name, getattr(self, name).index_select(0, index))
        self.generations = [self.generations[row] for row in order]
        self.streams = [self.streams[row] for row in order]
        if not order:
            self.ids, self.logprobs = self.ids[:, :1], self.logprobs[:, :1]
        self._describe()

    def draws(self, first: int) -> Tensor:
        """The next random number [B - first] of each row from `first` on."""
        position = self.counts[first:] % _CHUNK
        if self.most >= _CHUNK:
            for row in ((position == 0) & (self.counts[first:] > 0)).nonzero()[:, 0].tolist():
                self.uniforms[first + row] = self.streams[first + row].chunk().to(self._real).to(self._device)
        return self.uniforms[first:].gather(1, position[:, None])[:, 0]

    def record(self, first: int, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Store one sampled token per row from `first` on. Returns bool [B - first]: the rows that end with it."""
        if self.most + 1 > self.ids.shape[1]:
            self.ids = _widened(self.ids, self.ids.shape[1] * 2 + 64, 0)
            self.logprobs = _widened(self.logprobs, self.logprobs.shape[1] * 2 + 64, 0)
        counts = self.counts[first:]
        self.ids[first:].scatter_(1, counts[:, None], tokens[:, None])
        self.logprobs[first:].scatter_(1, counts[:, None], logprobs[:, None])
        counts += 1
        self.tokens[first:] = tokens
        self.most = max(self.most + (first == 0), 1)
        ended = (tokens[:, None] == self.ends[first:]).any(1) & (counts >= self.minimum[first:])
        return ended | (counts >= self.limits[first:])

    def metadata(self, first: int) -> SamplingMetadata:
        """The settings of the rows from `first` on."""
        one = self._metadata
        cut = [None if part is None else part[first:] for part in (one.greedy, one.min_p, one.top_k, one.top_p)]
        return SamplingMetadata(one.temperature[first:], *cut)

    def _describe(self) -> None:
        temperature, greedy, min_p, top_k, top_p = self.settings.unbind(1)
        self._metadata = SamplingMetadata(
            temperature.to(torch.float32),
            greedy.bool() if greedy.any() else None,
            min_p.to(torch.float32) if (min_p > 0).any() else None,
            top_k.to(torch.int64) if (top_k > 0).any() else None,
            top_p.to(torch.float32) if (top_p < 1).any() else None,
        )
        self.most = int(self.counts.max()) if len(self.counts) else 0  # the most tokens that a row has sampled
        self.watched = [row for row, generation in enumerate(self.generations) if generation.watched]
        self.adjusted = [row for row, generation in enumerate(self.generations) if _adjusted(generation)]

    def _joined(self, tensor: Tensor, values: Sequence[int]) -> Tensor:
        return torch.cat([tensor, torch.tensor(values, dtype=torch.int64, device=self._device)])


def _adjusted(generation: Generation) -> bool:
    """Whether the logits are changed before the temperature is applied."""
    settings = generation.settings
    return bool(settings.penalised or settings.logit_bias or settings.min_tokens or generation.mask)


def _widened(tensor: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)
