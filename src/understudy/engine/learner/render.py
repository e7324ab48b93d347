"""Renders conversations without recorded calls into samples, with the base's chat template.

Only this module tokenises messages for training. Its samples have no recorded logprobs; they are marked
`constrained="rendered"` and counted in the metrics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from understudy.errors import ConfigError
from understudy.types import Json, Message, RenderedHistory, Sampling, Tool

from ..protocol import JobTrajectory, Sample

RENDERED = "rendered"


def render_trajectory(
    tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int], trajectory: JobTrajectory, step: int
) -> JobTrajectory:
    """The trajectory with its histories as samples, one per target message, after its recorded samples. Raises
    ConfigError as `render_history`."""
    if not trajectory.histories:
        return trajectory
    rendered = tuple(
        sample
        for i, history in enumerate(trajectory.histories)
        for sample in render_history(tokenizer, end_ids, history, f"{trajectory.id}/history-{i}", step)
    )
    return replace(trajectory, samples=trajectory.samples + rendered, histories=())


def render_history(
    tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int], history: RenderedHistory, name: str, step: int
) -> tuple[Sample, ...]:
    """One sample per target message: the prompt that the sampler would get, and the message up to and including the
    first of `end_ids`. `step`: the model's current one. Raises ConfigError if the template renders the prompt
    differently after the answer is appended."""
    return tuple(_sample(tokenizer, end_ids, history, target, name, step) for target in history.targets)


def _sample(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    history: RenderedHistory,
    target: int,
    name: str,
    step: int,
) -> Sample:
    if not 0 <= target < len(history.messages) or history.messages[target].get("role") != "assistant":
        raise ConfigError(
            f"{name}: target {target} is not an assistant message of its {len(history.messages)} messages"
        )
    messages = [_for_template(message) for message in history.messages[: target + 1]]
    prompt = _text(tokenizer, messages[:-1], history.tools, name, generate=True)
    whole = _text(tokenizer, messages, history.tools, name, generate=False)
    if not whole.startswith(prompt):
        shared = len(_shared(prompt, whole))
        raise ConfigError(
            f"{name}: message {target} cannot be trained, because the chat template renders the conversation before it "
            f"differently once it is answered (at {prompt[shared : shared + 40]!r}): record the call at our endpoint "
            "instead of loading its transcript"
        )
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)  # pyright: ignore[reportUnknownMemberType]  # transformers carries partial types
    completion_ids = _until_end(tokenizer.encode(whole[len(prompt) :], add_special_tokens=False), end_ids)  # pyright: ignore[reportUnknownMemberType]  # transformers carries partial types
    return Sample(
        call_id=f"{name}/{target}",
        index=0,
        prompt_ids=np.array(prompt_ids, np.int32),
        completion_ids=np.array(completion_ids, np.int32),
        logprobs=np.full(len(completion_ids), np.nan, np.float32),
        sampling=Sampling(),
        step=step,
        constrained=RENDERED,
        tool_call=bool(history.messages[target].get("tool_calls")),
    )


def _text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    name: str,
    *,
    generate: bool,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]  # transformers carries partial types
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=generate, tokenize=False
            )
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise ConfigError(f"{name}: the chat template failed: {type(error).__name__}: {error}") from error


def _for_template(message: Message) -> Message:
    """The message with tool arguments as objects, as chat templates expect (OpenAI sends JSON text), and missing
    content as an empty text."""
    changed: Message = dict(message)
    if changed.get("content") is None:
        changed["content"] = ""
    if changed.get("tool_calls"):
        changed["tool_calls"] = [_call_for_template(call) for call in changed["tool_calls"]]
    return changed


def _call_for_template(call: Json) -> Json:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call  # not JSON: the template gets the text as it is
    return {**call, "function": {**function, "arguments": arguments}}


def _until_end(ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """The ids up to and including the first end token. Sampling stops there; the template adds the rest."""
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[: end + 1])


def _shared(a: str, b: str) -> str:
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:size]


def rendered_warning(share: float) -> str:
    """The warning about a step whose share of rendered calls is above `rendered_warn`."""
    return (
        f"{share:.0%} of the calls were rendered from messages, as their choices name no call that was recorded here: keep "
        "`completion.choices[0]` of this server's answers. If they are another endpoint's, and meant to be trained on, "
        "rendered_warn=1 says so"
    )
