"""How an engine deviates from OpenAI's chat completions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quirks:
    """Deviations that the gateway compensates for. The defaults describe an engine without any."""

    grammar_for_strict_tools: bool = False
    """vLLM decodes under a grammar even with tool_choice "auto" if a tool is strict or parallel_tool_calls is false."""
    no_seed: bool = False
    """vLLM on a CPU crashes if many calls have a seed, so seeds are not sent to it."""
    stream_blocks: bool = False
    """vLLM streams several tokens in a chunk if asked (`stream_interval`), and the base's answers need no reasoning parser."""
    flat_logprobs: bool = False
    """vLLM returns logprobs as a flat list with our plugin; without it, it ignores the request field."""
