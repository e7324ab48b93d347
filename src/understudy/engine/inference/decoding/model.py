"""The model that samples: weights, tokenizer, and its two forward passes over slots."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' models and configs are only partly typed.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ....errors import ConfigError, EngineError
from ...ends import end_tokens
from ...precision import device_name, dtype_of
from .adapters import Wardrobe
from .attention import NAME, additive, register
from .kv_cache import CacheShape, Slots, Window

_KINDS = {"full_attention", "sliding_attention"}
_PROBE_LENGTH = 12
_PROBE_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True)
class Prefill:
    """New tokens of one row: `new` follows the `past` tokens that the row already holds."""

    new: Sequence[int]
    past: int


class ModelRunner:
    """A causal model of transformers, run over `Slots`. Not thread-safe: one thread runs it."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.eos = end_tokens(tokenizer, model.generation_config)
        self.layers: dict[str, nn.Linear] = {
            str(name): module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self.wardrobe = Wardrobe(self.layers)
        self.device = model.device
        self.dtype = model.dtype
        config = model.config.get_text_config()
        kinds: set[str] = set(getattr(config, "layer_types", None) or ())
        if not kinds <= _KINDS:
            raise ConfigError(f"layers of kind {sorted(kinds - _KINDS)} need another engine; embedded knows {_KINDS}")
        self._window = getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
        self._by_kind = "sliding_attention" in kinds
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.shape = CacheShape(int(config.num_hidden_layers), heads, width, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, slots: Slots, first: int, parts: Sequence[Prefill]) -> Tensor:
        """Run each row's new tokens (rows first, first + 1, ...); logits float32 [rows, V] of each row's last token."""
        count, width = len(parts), max(len(part.new) for part in parts)
        lengths = [len(part.new) for part in parts]
        length = max(part.past + new for part, new in zip(parts, lengths, strict=True))
        ids = torch.zeros(count, width, dtype=torch.int64)
        for row, (part, new) in enumerate(zip(parts, lengths, strict=True)):
            ids[row, width - new :] = torch.tensor(part.new)  # left-padded, so that the last column is the last token
        ids = ids.to(self.device)
        past = torch.tensor([part.past for part in parts], device=self.device)
        pad = width - torch.tensor(lengths, device=self.device)
        place = torch.arange(width, device=self.device)
        positions = (past[:, None] + place - pad[:, None]).clamp_(min=0)
        real = place >= pad[:, None]
        sources, places = real.nonzero(as_tuple=True)
        fresh = length == width and not any(part.past for part in parts) and min(lengths) == width
        slots.reserve(first + count, length)
        slots.window = Window(first, count, length, positions[sources, places], sources, sources, places, fresh)
        keys = torch.arange(length, device=self.device)
        seen = keys <= positions[..., None]
        plain = fresh and (self._window is None or length <= self._window)
        return self._forward(ids, positions, slots, None if plain else seen)

    @torch.inference_mode()
    def decode(self, slots: Slots, tokens: Tensor, lengths: Tensor) -> Tensor:
        """One more token for rows 0..B-1: tokens [B] at positions `lengths` [B]; logits float32 [B, V]."""
        length = int(lengths.max()) + 1
        slots.reserve(len(tokens), length)
        slots.window = Window(0, len(tokens), length, lengths)
        even = int(lengths.min()) + 1 == length and (self._window is None or length <= self._window)
        seen = None if even else torch.arange(length, device=self.device) <= lengths[:, None, None]
        return self._forward(tokens[:, None], lengths[:, None], slots, seen)

    def _forward(self, ids: Tensor, positions: Tensor, slots: Slots, seen: Tensor | None) -> Tensor:
        masks = self._masks(positions, seen)
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].to(torch.float32)

    def _masks(self, positions: Tensor, seen: Tensor | None) -> Tensor | dict[str, Tensor | None] | None:
        """seen bool [B, Q, K], before any sliding window. Models with two kinds of layers take a mask per kind."""
        full = None if seen is None else additive(seen, self.dtype)
        if seen is None or self._window is None:
            return {"full_attention": full, "sliding_attention": full} if self._by_kind else full
        keys = torch.arange(seen.shape[-1], device=self.device)
        sliding = additive(seen & (keys > positions[..., None] - self._window), self.dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self._by_kind else sliding

    @torch.inference_mode()
    def probe(self) -> float:
        """Largest logit difference between this engine's passes and the model's plain forward on a few tokens.

        Raises EngineError when the architecture does not run over slots as it should (state across positions, masks
        that are ignored), because every recorded logprob would be wrong.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (2, _PROBE_LENGTH), generator=generator).tolist()
        slots = Slots(self.shape)
        self.prefill(slots, 0, [Prefill(ids[0][:5], 0), Prefill(ids[1][:3], 0)])
        self.prefill(slots, 0, [Prefill(ids[0][5:7], 5), Prefill(ids[1][3:7], 3)])
        ours = [
            self.decode(
                slots,
                torch.tensor([row[at] for row in ids], device=self.device),
                torch.full((2,), at, device=self.device),
            )
            for at in range(7, _PROBE_LENGTH)
        ]
        self.model.set_attn_implementation("sdpa")
        try:
            plain = self.model(input_ids=torch.tensor(ids, device=self.device)).logits[:, 7:].to(torch.float32)
        finally:
            self.model.set_attn_implementation(NAME)
        difference = float((torch.stack(ours, 1) - plain).abs().max())
        if not difference < _PROBE_LIMIT[self.dtype]:
            raise EngineError(
                f"{type(self.model).__name__} gives other logits in the embedded engine than plainly (by {difference:.3g}); "
                "its architecture needs another engine"
            )
        return difference


def load_model(folder: Path, *, device: str, dtype: str, max_model_len: int | None) -> ModelRunner:
    """Load weights and tokenizer from a model folder. device: auto, cpu, cuda, cuda:N, mps; dtype: auto or torch's name."""
    register()
    target = device_name(device)
    precision = dtype_of(dtype, target)
    if precision not in _PROBE_LIMIT:
        raise ConfigError(f"--dtype {dtype!r}: one of auto, float32, bfloat16, float16")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        limit = int(AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, attn_implementation=NAME)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {str(folder)!r} cannot be loaded: {error}") from error
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(f"--max-model-len {max_model_len} is longer than the model's own {limit}")
    model.eval().requires_grad_(False)
    model.to(torch.device(target))  # pyright: ignore[reportArgumentType]  # the mixin's signature hides nn.Module's
    return ModelRunner(model, tokenizer, max_model_len or limit)
