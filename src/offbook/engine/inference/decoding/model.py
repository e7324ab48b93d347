"""Loads a model and runs its two forward passes with a key-value cache, prefill and decode, through an attention function
of ours that transformers calls."""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' models and configs are only partly typed.
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from offbook.base.errors import ConfigError, EngineError

from ...base_model import UNSUPPORTED, architecture_of, attention_sizes, check_weights
from ...chat_template import end_tokens
from ...precision import device_name, dtype_of
from .adapters import AdapterLayers
from .dense import DenseDecoder, packs_of
from .kv_cache import CacheShape, KVCache, Window

NAME = "offbook_kv_cache"


def register() -> None:
    """Register `attn_implementation=NAME` with transformers. Can be called repeatedly."""
    AttentionInterface.register(NAME, cache_attention)  # pyright: ignore[reportUnknownMemberType]  # transformers' registry is only partly typed


def cache_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of query [B, H, Q, D] to key, value [B, KV, K, D] with an additive mask [B, 1, Q, K]; returns [B, Q, H, D].

    Without a mask, a single query attends to every key, and several queries are causal. For a single query the heads that
    share a key become the query dimension, so that keys are read once and not repeated.
    """
    if unsupported := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise ConfigError(
            f"the embedded engine does not compute the attention of {type(module).__name__} ({', '.join(unsupported)}): use "
            "--engine vllm"
        )
    batch, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    if queries == 1:
        folded = query.view(batch, key.shape[1], shared, width)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if shared > 1 and query.device.type != "cpu":
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=shared > 1 and query.device.type == "cpu",
    )
    return out.transpose(1, 2), None


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask [B, Q, K] (True: attend) to an additive mask [B, 1, Q, K]."""
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, None]


_KINDS = {"full_attention", "sliding_attention"}
_PROBE_LENGTH = 12
_PROBE_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True)
class Prefill:
    """The new tokens of one row, which follow the `past` tokens in the cache."""

    new: Sequence[int]
    past: int


class ModelRunner:
    """A causal language model of transformers with a `KVCache`. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.eos = end_tokens(tokenizer, model.generation_config)
        self.layers: dict[str, nn.Linear] = {
            str(name): module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        packs = packs_of(model)
        self.adapter_layers = AdapterLayers(self.layers, packs)
        if packs and model.config.tie_word_embeddings:
            model.get_input_embeddings().weight = self.layers["lm_head"].weight
        self._dense = DenseDecoder(model, self.adapter_layers) if packs else None
        self.device = model.device
        self.dtype = model.dtype
        config = model.config.get_text_config()
        kinds: set[str] = set(getattr(config, "layer_types", None) or ())
        if not kinds <= _KINDS:
            raise ConfigError(
                f"the embedded engine does not support layers of kind {sorted(kinds - _KINDS)}, only {sorted(_KINDS)}: "
                "use --engine vllm"
            )
        self._window = getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
        self._by_kind = "sliding_attention" in kinds
        sizes = attention_sizes(config)
        heads, width = max(size.kv_heads for size in sizes), max(size.head_dim for size in sizes)
        self.shape = CacheShape(int(config.num_hidden_layers), heads, width, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, first: int, parts: Sequence[Prefill]) -> Tensor:
        """Compute the new tokens of rows first, first + 1, ...; returns logits float32 [rows, V] of their last tokens."""
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
        is_token = place >= pad[:, None]
        sources, places = is_token.nonzero(as_tuple=True)
        fresh = length == width and not any(part.past for part in parts) and min(lengths) == width
        cache.reserve(first + count, length)
        cache.window = Window(first, count, length, positions[sources, places], sources, sources, places, fresh)
        keys = torch.arange(length, device=self.device)
        seen = keys <= positions[..., None]
        plain = fresh and (self._window is None or length <= self._window)
        return self._forward(ids, positions, cache, None if plain else seen)

    @torch.inference_mode()
    def decode(self, cache: KVCache, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Compute one more token of rows 0 to B - 1: tokens [B] at positions `lengths` [B]; logits float32 [B, V]."""
        length = int(lengths.max()) + 1
        cache.reserve(len(tokens), length)
        cache.window = Window(0, len(tokens), length, lengths, torch.arange(len(tokens), device=self.device))
        even = int(lengths.min()) + 1 == length and (self._window is None or length <= self._window)
        seen = None if even else torch.arange(length, device=self.device) <= lengths[:, None, None]
        if self._dense is not None:
            return self._dense.decode(cache, tokens, lengths, None if seen is None else additive(seen, self.dtype))
        return self._forward(tokens[:, None], lengths[:, None], cache, seen)

    def _forward(self, ids: Tensor, positions: Tensor, cache: KVCache, seen: Tensor | None) -> Tensor:
        masks = self._masks(positions, seen)
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].to(torch.float32)

    def _masks(self, positions: Tensor, seen: Tensor | None) -> Tensor | dict[str, Tensor | None] | None:
        """Attention masks from seen bool [B, Q, K], to which the sliding window is added.

        A model with two kinds of layers gets one mask per kind.
        """
        full = None if seen is None else additive(seen, self.dtype)
        if seen is None or self._window is None:
            return {"full_attention": full, "sliding_attention": full} if self._by_kind else full
        keys = torch.arange(seen.shape[-1], device=self.device)
        sliding = additive(seen & (keys > positions[..., None] - self._window), self.dtype)
        return {"full_attention": full, "sliding_attention": sliding} if self._by_kind else sliding

    @torch.inference_mode()
    def probe(self) -> float:
        """The largest difference of logits between this engine and the model's plain forward pass, on a few tokens.

        Raises EngineError if it is too large. Then the architecture does not work with this cache, for example because it
        has recurrent state or ignores masks, and every recorded logprob would be wrong.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (2, _PROBE_LENGTH), generator=generator).tolist()
        cache = KVCache(self.shape)
        self.prefill(cache, 0, [Prefill(ids[0][:5], 0), Prefill(ids[1][:3], 0)])
        self.prefill(cache, 0, [Prefill(ids[0][5:7], 5), Prefill(ids[1][3:7], 3)])
        ours = [
            self.decode(
                cache,
                torch.tensor([row[position] for row in ids], device=self.device),
                torch.full((2,), position, device=self.device),
            )
            for position in range(7, _PROBE_LENGTH)
        ]
        self.model.set_attn_implementation("sdpa")
        try:
            plain = self.model(input_ids=torch.tensor(ids, device=self.device)).logits[:, 7:].to(torch.float32)
        finally:
            self.model.set_attn_implementation(NAME)
        difference = float((torch.stack(ours, 1) - plain).abs().max())
        if not difference < _PROBE_LIMIT[self.dtype]:
            raise EngineError(
                f"the logits of {type(self.model).__name__} in the embedded engine differ by {difference:.3g} from its plain "
                "forward pass: use --engine vllm"
            )
        return difference


def load_model(folder: Path, *, device: str, dtype: str, max_model_len: int | None) -> ModelRunner:
    """Load weights and tokenizer from a folder. Raises ConfigError for an invalid option or folder.

    `device` is auto, cpu, cuda, cuda:N or mps; `dtype` is auto, float32, bfloat16 or float16.
    """
    register()
    target = device_name(device)
    precision = dtype_of(dtype, target)
    if precision not in _PROBE_LIMIT:
        raise ConfigError(f"--dtype {dtype!r} is not supported: use auto, float32, bfloat16 or float16")
    try:
        check_weights(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        limit = int(config.get_text_config().max_position_embeddings)
        model = architecture_of(config).from_pretrained(
            folder, dtype=precision, attn_implementation=NAME, trust_remote_code=False
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {str(folder)!r} cannot be loaded: {error}") from error
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len} is longer than the model's context of {limit} tokens: lower it"
        )
    model.eval().requires_grad_(False)
    model.to(torch.device(target))  # pyright: ignore[reportArgumentType]  # the mixin's signature hides nn.Module's
    return ModelRunner(model, tokenizer, max_model_len or limit)
