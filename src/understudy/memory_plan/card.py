"""A GPU by its memory: one of this machine, or one that a user thinks of renting."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
_LARGE = 70 * GIB


@dataclass(frozen=True)
class Card:
    """`memory` in bytes. `name` as it is shown."""

    name: str
    memory: int

    @property
    def is_large(self) -> bool:
        """Whether vLLM 0.32 takes its defaults of an H100. It gives an A100 the smaller ones, which need less."""
        return self.memory >= _LARGE

    @property
    def decoded_calls(self) -> int:
        """vLLM's own --max-num-seqs on this card (`EngineArgs.get_batch_defaults`)."""
        return 1024 if self.is_large else 256

    @property
    def prefill_tokens(self) -> int:
        """vLLM's own --max-num-batched-tokens on this card."""
        return 8192 if self.is_large else 2048


def parse_card(text: str) -> Card:
    """`24GB` (10^9 bytes: no card sold by that name has less) or `22.5GiB`. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--card {text!r}: give the GPU's memory, such as 24GB or 79.6GiB")
    unit = GIB if match[2].lower() == "gib" else 10**9
    return Card(text.strip(), int(float(match[1]) * unit))
