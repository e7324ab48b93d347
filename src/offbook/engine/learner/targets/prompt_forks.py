"""Forks: a later prompt that does not continue an earlier call token by token, and the cause. Pure numpy.

Training is exact in spite of forks: the token tree branches there. The counts per cause show how a chat template or an
app rewrites its history, which costs shared computation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbook.base.json_files import parse_json
from offbook.engine.protocol import JobTrajectory, Sample
from offbook.engine.token_file import Fork
from offbook.engine.token_tree import common_prefix, left_at

Cause = Literal["template", "tools", "history_edited", "retokenised", "truncated", "retried", "other_prompt"]
CAUSES: tuple[Cause, ...] = (
    "template",  # only white space or hidden reasoning differs from the sampled text
    "tools",  # the later prompt has a sampled tool call as other text with the same meaning, or not at all
    "history_edited",  # the later prompt has another answer, or an earlier message changed
    "retokenised",  # the same text, but other tokens
    "truncated",  # the answer had no end-of-turn token, and the text differs
    "retried",  # the same prompt, sampled again
    "other_prompt",  # a new conversation or other tools: the first message already differs
)

Decode = Callable[[Sequence[int]], str]


def find_forks(trajectory: JobTrajectory, decode: Decode, end_ids: frozenset[int]) -> list[Fork]:
    """The forks among a trajectory's calls, in the order of the later calls. Every call is compared with the earlier
    call that shares the longest prefix with its prompt. `end_ids`: tokens that end a turn."""
    samples, forks = trajectory.samples, list[Fork]()
    for i in range(1, len(samples)):
        later = samples[i]
        prompt = later.prompt_ids
        earlier = max(samples[:i], key=lambda sample: (_shared(sample, prompt), -len(sample.completion_ids)))
        position = left_at(earlier, prompt)
        if position is not None:
            forks.append(
                Fork(
                    trajectory=trajectory.id,
                    later=(later.call_id, later.index),
                    earlier=(earlier.call_id, earlier.index),
                    position=position,
                    cause=_cause(earlier, prompt, position, decode, end_ids),
                )
            )
    return forks


def _shared(sample: Sample, prompt: NDArray[np.int32]) -> int:
    return common_prefix(np.concatenate([sample.prompt_ids, sample.completion_ids]), prompt)


def _cause(earlier: Sample, prompt: NDArray[np.int32], position: int, decode: Decode, end_ids: frozenset[int]) -> Cause:
    start = len(earlier.prompt_ids)
    if position < start:
        if end_ids.isdisjoint(earlier.prompt_ids[:position].tolist()):
            return "other_prompt"
        return "history_edited"
    if len(prompt) == start:
        return "retried"
    completion = [int(token) for token in earlier.completion_ids]
    ended = bool(completion) and completion[-1] in end_ids
    sampled = decode(completion[:-1] if ended else completion)
    rest = [int(token) for token in prompt[start:]]
    end = next((i for i, token in enumerate(rest) if token in end_ids), len(rest))
    returned = decode(rest[:end])
    if returned == sampled or (not ended and returned.startswith(sampled)):
        return "retokenised"
    if _without_calls(returned) == _without_calls(sampled):
        if _bodies(returned) == _bodies(sampled):
            return "template"
        if not _bodies(returned) or _calls(returned) == _calls(sampled):
            return "tools"
        return "history_edited"
    return "history_edited" if ended else "truncated"


def _plain(text: str) -> str:
    """The text without hidden reasoning and white space."""
    closed, end, rest = text.rpartition(
        "</think>"
    )  # every thought that begins before it is closed: none is searched for twice
    return re.sub(r"\s+", "", re.sub(r"<think>.*?</think>", "", closed + end, flags=re.DOTALL) + rest)


def _without_calls(text: str) -> str:
    return _plain(re.sub(r"<tool_call>.*?(</tool_call>|$)", "", text, flags=re.DOTALL))


def _bodies(text: str) -> list[str]:
    return [body.strip() for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, flags=re.DOTALL)]


def _calls(text: str) -> list[str]:
    """The tool calls of a text in a canonical form: JSON with sorted keys, or the plain text if it is not JSON."""
    calls: list[str] = []
    for body in _bodies(text):
        try:
            calls.append(json.dumps(parse_json(body), sort_keys=True))
        except ValueError:
            calls.append(_plain(body))
    return calls
