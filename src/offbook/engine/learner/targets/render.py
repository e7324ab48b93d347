"""Renders conversations without recorded calls into samples, with the samplers' own `ChatTemplate`.

Only this module tokenises messages for training. Its samples have no recorded logprobs; they are marked
`constrained="rendered"` and counted in the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from offbook.base.errors import ConfigError
from offbook.base.types import Message, RenderedHistory, Sampling
from offbook.engine.chat_template import ChatTemplate, PromptError
from offbook.engine.inference.chat.requests import shortened
from offbook.engine.protocol import JobTrajectory, Sample

RENDERED = "rendered"


@dataclass(frozen=True)
class Renderer:
    """What rendering needs of the base, and of the job. `longest`: tokens of prompt and answer that the base's positions
    allow; None: any number. `skip_bad`: see `TrainConfig`."""

    template: ChatTemplate
    end_ids: frozenset[int]
    longest: int | None = None
    skip_bad: bool = False

    def trajectory(self, trajectory: JobTrajectory, step: int) -> tuple[JobTrajectory, tuple[str, ...]]:
        """The trajectory with its histories as samples, one per target message, after its recorded samples; and why
        targets were skipped. `step`: the model's current one. Raises ConfigError as `render_history`, unless bad ones
        are skipped."""
        rendered: list[Sample] = []
        skipped: list[str] = []
        for i, history in enumerate(trajectory.histories):
            name = f"{trajectory.id}/history-{i}"
            for target, weight in zip(history.targets, history.weights or (1.0,) * len(history.targets), strict=True):
                try:
                    sample = _sample(self.template, self.end_ids, history, target, name, step)
                    self._check_length(sample, history.source or name, target)
                except ConfigError as error:
                    if not self.skip_bad:
                        raise
                    skipped.append(str(error))
                else:
                    rendered.append(replace(sample, weight=weight))
        whole = replace(trajectory, samples=trajectory.samples + tuple(rendered), histories=())
        return whole, tuple(skipped)

    def _check_length(self, sample: Sample, name: str, target: int) -> None:
        if self.longest is not None and sample.length > self.longest:
            raise ConfigError(
                f"{name}: message {target} ends at token {sample.length} of the conversation, and the base's context has "
                f"{self.longest}: shorten the conversation, or skip it (skip_bad)"
            )


def render_history(
    template: ChatTemplate, end_ids: frozenset[int], history: RenderedHistory, name: str, step: int
) -> tuple[Sample, ...]:
    """One sample per target message: the prompt that the sampler would get, and the message up to and including the
    first of `end_ids`. `step`: the model's current one. Raises ConfigError if the template renders the prompt
    differently after the answer is appended, or leaves out a part of either."""
    return tuple(_sample(template, end_ids, history, target, name, step) for target in history.targets)


def last_turns(trajectory: JobTrajectory) -> JobTrajectory:
    """The trajectory with the last turn alone: its last recorded call, and the last target of each history."""
    last = trajectory.samples[-1].call_id if trajectory.samples else ""
    return replace(
        trajectory,
        samples=tuple(sample for sample in trajectory.samples if sample.call_id == last),
        histories=tuple(
            history.model_copy(update={"targets": history.targets[-1:], "weights": history.weights[-1:]})
            for history in trajectory.histories
        ),
    )


def _sample(
    template: ChatTemplate,
    end_ids: frozenset[int],
    history: RenderedHistory,
    target: int,
    name: str,
    step: int,
) -> Sample:
    where = history.source or name
    if not 0 <= target < len(history.messages) or history.messages[target].get("role") != "assistant":
        raise ConfigError(
            f"{where}: target {target} is not an assistant message of its {len(history.messages)} messages"
        )
    before = history.messages[:target]
    answer = {field: value for field, value in history.messages[target].items() if field != "name"}  # it writes no name
    try:
        prompt = template.render(before, history.tools, {"add_generation_prompt": True})
        whole = template.render((*before, answer), history.tools)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not whole.startswith(prompt):
        shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        raise ConfigError(
            f"{where}: message {target} cannot be trained, because the chat template renders the conversation before it "
            f"differently once it is answered (at {template.shown(prompt[shared : shared + 40])!r}): record the call at our endpoint "
            "instead of loading its transcript"
        )
    completion = whole[len(prompt) :]
    ids = template.encode(completion)
    completion_ids = _until_end(ids, end_ids)
    rest = template.decode(ids[len(completion_ids) :])
    _check_completion(answer, template.shown(completion), rest, f"{where}: message {target}")
    return Sample(
        call_id=f"{name}/{target}",
        index=0,
        prompt_ids=np.array(template.encode(prompt), np.int32),
        completion_ids=np.array(completion_ids, np.int32),
        logprobs=np.full(len(completion_ids), np.nan, np.float32),
        sampling=Sampling(),
        step=step,
        constrained=RENDERED,
        tool_call=bool(history.messages[target].get("tool_calls")),
    )


def _check_completion(answer: Message, completion: str, rest: str, name: str) -> None:
    """Raise ConfigError for a part of the answer that would not be trained: a thought that the template leaves out, or
    `rest`, what it writes after the end of the turn."""
    thought = answer.get("reasoning") or answer.get("reasoning_content") or ""
    if thought.strip() not in completion:
        raise ConfigError(
            f"{name} cannot be trained with its thought ({shortened(thought)}), which the chat template leaves out: drop "
            "`reasoning`, or use a base whose template writes thoughts"
        )
    if rest.strip():
        raise ConfigError(
            f"{name} cannot be trained: the chat template ends the turn before {shortened(rest.strip())}. Split it into two "
            "messages, or use a base whose template writes it as one turn"
        )


def _until_end(ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """The ids up to and including the first end token. Sampling stops there; the template adds the rest."""
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[: end + 1])


def rendered_warning(share: float) -> str:
    """The warning about a step whose share of rendered calls is above `rendered_warn`."""
    return (
        f"{share:.0%} of the calls were rendered from messages, as their choices name no call that was recorded here: keep "
        "`completion.choices[0]` of this server's answers. If they are another endpoint's, and meant to be trained on, "
        "rendered_warn=1 says so"
    )
