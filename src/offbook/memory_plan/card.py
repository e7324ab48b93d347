"""A GPU, described by its memory: one of this machine, or one to plan for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbook.base.errors import ConfigError

GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
_LARGE = 70 * GIB
"""Bytes from which vLLM uses its larger defaults."""


@dataclass(frozen=True)
class Card:
    """A GPU with `memory` bytes, of which other programs hold `taken`. `name` is for display."""

    name: str
    memory: int
    taken: int = 0

    @property
    def usable(self) -> int:
        """Bytes that sampling and training can use."""
        return self.memory - self.taken

    @property
    def described(self) -> str:
        """Name and size, and how much other programs hold."""
        others = f", {self.taken / GIB:.1f} of them held by other programs" if self.taken else ""
        return f"{self.name} ({self.memory / GIB:.1f} GiB{others})"

    @property
    def is_large(self) -> bool:
        """Whether the plan uses vLLM 0.32's defaults for an H100. On an A100, vLLM itself uses the smaller ones, which
        need less memory."""
        return self.memory >= _LARGE

    @property
    def decoded_calls(self) -> int:
        """vLLM's default of --max-num-seqs on this card (`EngineArgs.get_batch_defaults`)."""
        return 1024 if self.is_large else 256

    @property
    def prefill_tokens(self) -> int:
        """vLLM's default of --max-num-batched-tokens on this card."""
        return 8192 if self.is_large else 2048


def parse_card(text: str) -> Card:
    """Parse a size in GB (10^9 bytes) or GiB. Raises ConfigError for other text.

    >>> parse_card("24GB").memory, parse_card("22.5GiB").memory
    (24000000000, 24159191040)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--card {text!r} is not a size: give the GPU's memory, such as 24GB or 79.6GiB")
    unit = GIB if match[2].lower() == "gib" else 10**9
    return Card(text.strip(), int(float(match[1]) * unit))
