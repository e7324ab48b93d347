"""Which tokens end a turn: one rule for the sampler, which stops there, and the learner, which cuts there."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedTokenizerBase


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """The tokenizer's end token and those of the model's generation config."""
    own = getattr(generation, "eos_token_id", None)
    ids: list[object] = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    return frozenset(token for token in ids if isinstance(token, int))
