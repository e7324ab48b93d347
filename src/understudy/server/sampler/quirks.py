"""What an engine does differently with fields of a chat completion request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quirks:
    """The defaults are those of an engine that takes every field as OpenAI means it."""

    grammar_for_strict_tools: bool = False
    """vLLM constrains free calls too, when a tool is strict or only one call at a time is allowed."""
    no_seed: bool = False
    """vLLM on a CPU ends when many calls have a seed."""
    flat_logprobs: bool = False
    """vLLM returns logprobs as a flat list with our plugin; without it, it ignores the request field."""
