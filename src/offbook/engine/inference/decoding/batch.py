"""A batch: the generations of one adapter that are decoded together, and its sampling state, tensors with one entry per
row."""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# numpy's and torch's constructors are only partly typed.
import secrets

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch's `tolist` and indexing are only partly typed.
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbook.base.types import CUT_OFF

from ... import sampling
from .generation import Failure, FinishReason, Generation, NoAllowedToken, Update
from .kv_cache import BLOCK, KVCache, Prefix, PrefixStore, common
from .model import ModelRunner, Prefill

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
            (1.0, 1.0, 0.0, 0.0, 1.0) if setting.greedy else (one.temperature, 0.0, one.min_p, one.top_k, one.top_p)
            for setting in settings
            for one in (setting.sampling,)
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

    def _describe(self) -> None:
        temperature, greedy, min_p, top_k, top_p = self.settings.unbind(1)
        self.greedy = greedy.bool() if greedy.any() else None
        self.filters = sampling.RowSettings(
            temperature.to(torch.float32),
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


PREFILL_TOKENS = {"cpu": 2048}
"""Most new tokens of one prefill pass, by device; 2,048 fit a CPU's caches. Longer prompts take several passes."""
_PREFILL_TOKENS = 16_384
PREFIX_BYTES = 256 * 2**20
"""Memory for cached prefixes, per adapter."""

Updates = list[tuple[Generation, Update]]


class NotFinite(ArithmeticError):
    """The model computed NaN or infinite logits."""


@dataclass
class _Prompt:
    """A distinct prompt of generations that enter together. `done` is the number of first tokens that are computed."""

    tokens: tuple[int, ...]
    generations: list[Generation]
    done: int = 0
    prefix: Prefix | None = None


class RunningBatch:
    """The running generations, in rows [0, B) of the cache. `admit` adds them, `step` samples, and finished ones leave.

    The batch's adapter must be active in the model during `admit` and `step`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._cache = KVCache(runner.shape)
        self._rows = Rows(runner.device)
        self._prefixes = PrefixStore(PREFIX_BYTES // runner.shape.token_bytes)
        self._pass_tokens = PREFILL_TOKENS.get(runner.device.type, _PREFILL_TOKENS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def generations(self) -> Sequence[Generation]:
        """The running generations, by row."""
        return self._rows.generations

    @torch.inference_mode()
    def admit(self, generations: Sequence[Generation]) -> Updates:
        """Compute the prompts of new generations (equal prompts once), and sample their first tokens."""
        by_tokens: dict[tuple[int, ...], _Prompt] = {}
        for generation in generations:
            by_tokens.setdefault(generation.prompt_ids, _Prompt(generation.prompt_ids, [])).generations.append(
                generation
            )
        prompts = list(by_tokens.values())
        first = len(self._rows)
        self._cache.reserve(first + len(generations), max(len(prompt.tokens) for prompt in prompts) + 1)
        self._look_up(prompts, first)
        prompts.sort(key=_uncomputed)
        logits = self._prefill(prompts, first)
        entering = [prompt.generations[0] for prompt in prompts]
        order = list(range(len(prompts)))
        for index, prompt in enumerate(prompts):
            others = prompt.generations[1:]
            if others:
                rows = torch.arange(first + len(entering), first + len(entering) + len(others), device=logits.device)
                self._cache.copy(first + index, rows, len(prompt.tokens))
                entering += others
                order += [index] * len(others)
        self._rows.append(entering, self._runner.max_model_len)
        return self._advance(logits[order], first)

    @torch.inference_mode()
    def step(self) -> Updates:
        """Sample one token for every running generation."""
        rows = self._rows
        logits = self._runner.decode(self._cache, rows.tokens, rows.lengths)
        rows.lengths += 1
        return self._advance(logits, 0)

    @torch.inference_mode()
    def remove(self, generations: Iterable[Generation]) -> None:
        """Remove cancelled generations."""
        gone = set(generations)
        self._leave([row for row, generation in enumerate(self._rows.generations) if generation in gone])

    def _look_up(self, prompts: Sequence[_Prompt], first: int) -> None:
        """Set the cached prefix of each prompt. At least the last token of a prompt is left to compute."""
        shared = self._shared(prompts)
        if shared:
            self._compute([_Prompt(shared, [])], first)
            self._prefixes.put(Prefix(shared, self._cache.read(first, len(shared))))
        for prompt in prompts:
            match = self._prefixes.find(prompt.tokens)
            if match:
                prompt.prefix, prompt.done = match[0], min(match[1], len(prompt.tokens) - 1)

    def _shared(self, prompts: Sequence[_Prompt]) -> tuple[int, ...]:
        """The common prefix of all prompts, if it is at least a block longer than the cached one; else empty."""
        if len(prompts) < 2:
            return ()
        tokens = [prompt.tokens for prompt in prompts]
        length = min(common(min(tokens), max(tokens)), min(map(len, tokens)) - 1)
        match = self._prefixes.find(tokens[0])
        known = match[1] if match else 0
        return tokens[0][:length] if length - known >= BLOCK else ()

    def _prefill(self, prompts: Sequence[_Prompt], first: int) -> Tensor:
        """Logits [P, V] of each prompt's last token. Prompt i is computed in row `first + i`."""
        for row, prompt in enumerate(prompts, first):
            if prompt.prefix:
                kv = prompt.prefix.kv[:, :, :, : prompt.done]
                self._cache.write(torch.tensor([row], device=kv.device), kv)
        logits: list[Tensor] = []
        start = 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and (end + 1 - start) * _uncomputed(prompts[end]) <= self._pass_tokens:
                end += 1
            logits.append(self._compute(prompts[start:end], first + start))
            start = end
        for row, prompt in enumerate(prompts, first):
            if self._prefixes.wants(prompt.tokens):
                self._prefixes.put(Prefix(prompt.tokens, self._cache.read(row, len(prompt.tokens))))
        return torch.cat(logits)

    def _compute(self, prompts: Sequence[_Prompt], first: int) -> Tensor:
        """Compute the rest of some prompts, a long prompt in several passes. Logits [P, V] of their last tokens."""
        while _uncomputed(prompts[0]) > self._pass_tokens:
            prompt = prompts[0]
            part = prompt.tokens[prompt.done : prompt.done + self._pass_tokens]
            self._runner.prefill(self._cache, first, [Prefill(part, prompt.done)])
            prompt.done += len(part)
        parts = [Prefill(prompt.tokens[prompt.done :], prompt.done) for prompt in prompts]
        return self._runner.prefill(self._cache, first, parts)

    def _advance(self, logits: Tensor, first: int) -> Updates:
        """Sample one token for the rows from `first` on. Return their updates, and remove finished rows."""
        rows = self._rows
        failures: dict[int, Failure] = {}
        for row in rows.adjusted:
            if row >= first:
                try:
                    logits[row - first] = self._adjusted(logits[row - first], row)
                except NoAllowedToken as error:
                    failures[row] = self._grammar_failure(row, error)
        logprobs = sampling.processed_logprobs(logits, rows.filters.since(first))
        tokens = sampling.draw(logprobs, rows.draws(first), None if rows.greedy is None else rows.greedy[first:])
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        if not bool(torch.isfinite(chosen).all()):
            raise NotFinite(
                "the model's logits are NaN or infinite: use another checkpoint, or check the base's weights"
            )
        ended = rows.record(first, tokens, chosen)
        reasons: dict[int, tuple[FinishReason, int | str | None]] = {}
        for row in (ended.nonzero()[:, 0] + first).tolist() if bool(ended.any()) else ():
            reasons[row] = self._reason(row)
        updates: Updates = [(rows.generations[row], Update(failure=failure)) for row, failure in failures.items()]
        for row in rows.watched:
            if row >= first and row not in failures:
                self._watch(row, logprobs[row - first], reasons, updates)
        updates += [self._last(row, *reason) for row, reason in reasons.items() if row not in failures]
        self._leave(sorted({*reasons, *failures}))
        return updates

    def _grammar_failure(self, row: int, error: NoAllowedToken) -> Failure:
        """The failure of a row whose grammar allows no token. Its status is 400, because the grammar is the client's."""
        answer = self._runner.tokenizer.decode(self._rows.ids[row, : int(self._rows.counts[row])])
        return Failure(f"{error} (the answer so far: {str(answer)[-100:]!r})", code=None, status=400, param=error.param)

    def _adjusted(self, logits: Tensor, row: int) -> Tensor:
        """The logits [V] of one row after grammar, min_tokens, logit bias and penalties, in vLLM's order."""
        generation, count = self._rows.generations[row], int(self._rows.counts[row])
        settings = generation.settings
        if generation.mask:
            logits = generation.mask.apply(logits)
        if count < settings.min_tokens:
            logits[sorted(generation.end_ids | generation.eos)] = -torch.inf
        for token, bias in settings.logit_bias:
            logits[token] += bias
        if settings.penalised:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[list(generation.prompt_ids)] = True
            counts = torch.bincount(self._rows.ids[row, :count], minlength=len(logits)).to(logits.dtype)
            repetition, frequency = settings.repetition_penalty, settings.frequency_penalty
            logits = sampling.penalised(logits, seen, counts, repetition, frequency, settings.presence_penalty)
        return logits

    def _reason(self, row: int) -> tuple[FinishReason, int | str | None]:
        generation, token = self._rows.generations[row], int(self._rows.tokens[row])
        if token in generation.end_ids and self._rows.counts[row] >= self._rows.minimum[row]:
            return "stop", None if token in generation.eos else token
        return CUT_OFF, None

    def _watch(
        self,
        row: int,
        logprobs: Tensor,
        reasons: dict[int, tuple[FinishReason, int | str | None]],
        updates: Updates,
    ) -> None:
        """Process the token of a row that is streamed, or has a grammar, stop strings or top logprobs."""
        rows, generation = self._rows, self._rows.generations[row]
        token, settings = int(rows.tokens[row]), generation.settings
        if settings.top_logprobs:
            best = logprobs.topk(min(settings.top_logprobs, len(logprobs)))
            generation.top.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        if generation.mask:
            generation.mask.accept(token)
        stop = reasons.get(row, (CUT_OFF, None))[0] == "stop"
        if generation.stop_detector and not stop:
            stop_string = generation.stop_detector.push(token, armed=bool(rows.counts[row] >= rows.minimum[row]))
            if stop_string is not None:
                reasons[row] = ("stop", stop_string)
        if generation.streamed and row not in reasons:
            updates.append((generation, self._since(row)))

    def _since(self, row: int) -> Update:
        generation = self._rows.generations[row]
        start, end = generation.sent, int(self._rows.counts[row])
        generation.sent = end
        ids, logprobs = self._rows.ids[row, start:end], self._rows.logprobs[row, start:end]
        return Update(tuple(ids.tolist()), tuple(logprobs.tolist()), tuple(generation.top[start:end]))

    def _last(self, row: int, finish: FinishReason, stop_reason: int | str | None) -> tuple[Generation, Update]:
        update = self._since(row)
        return self._rows.generations[row], Update(
            update.token_ids, update.logprobs, update.top, finish=finish, stop_reason=stop_reason
        )

    def _leave(self, leaving: Sequence[int]) -> None:
        """Cache the tokens of leaving rows, then move the last rows into the gaps."""
        if not leaving:
            return
        rows, count = self._rows, len(self._rows)
        self._remember(leaving)
        remaining = count - len(leaving)
        leaving_set = set(leaving)
        holes = [row for row in leaving if row < remaining]
        movers = [row for row in range(remaining, count) if row not in leaving_set]
        order = list(range(remaining))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            device = self._runner.device
            length = int(rows.lengths[movers].max())
            self._cache.move(torch.tensor(movers, device=device), torch.tensor(holes, device=device), length)
        rows.keep(order)

    def _remember(self, leaving: Sequence[int]) -> None:
        """Cache keys and values of finished rows, because the next call of the conversation begins with these tokens."""
        rows = self._rows
        for row in leaving:
            length, prompt = int(rows.lengths[row]), rows.generations[row].prompt_ids
            tokens = (*prompt, *rows.ids[row, : length - len(prompt)].tolist())
            if self._prefixes.wants(tokens):
                self._prefixes.put(Prefix(tokens, self._cache.read(row, length)))


def _uncomputed(prompt: _Prompt) -> int:
    return len(prompt.tokens) - prompt.done
