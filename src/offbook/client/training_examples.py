"""Training examples of a supervised training: rollouts, or conversations of others, as records for the server."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from offbook.base.choices import is_choice
from offbook.base.errors import ConfigError
from offbook.base.types import History, Json, Message, RenderedHistory, RolloutPlace, Trajectory, TrajectoryGroup
from offbook.base.user_values import as_list
from offbook.base.wire import TrajectoryRecord
from offbook.supervised.conversations import Conversation, Rows, read_conversations
from offbook.supervised.masking import Masking, TextFilter

from .rollouts.records import trajectory_record

Rollout: TypeAlias = Trajectory | TrajectoryGroup
TrainingData: TypeAlias = Rollout | Iterable[Rollout] | str | Path | Rows
"""Trajectories or groups of them; a `.jsonl` file, rows, or a `datasets.Dataset` of conversations."""


@dataclass(frozen=True)
class TrainingExample:
    """One example. `recorded`: it has calls that the server recorded, under its own id. `digest`: equal examples have
    the same."""

    record: TrajectoryRecord
    recorded: bool
    digest: str


@dataclass(frozen=True)
class TrainingExamples:
    """The examples. `skipped` were left out: faulty rows, and rollouts that failed; `redacted`: texts with a secret
    masked."""

    examples: tuple[TrainingExample, ...]
    skipped: int = 0
    redacted: int = 0


def read_examples(
    what: TrainingData, model: str, *, skip_bad: bool = False, filter: TextFilter | None = None
) -> TrainingExamples:
    """The examples of rollouts, or of conversations as `read_conversations` reads them. `filter` replaces texts of what is
    rendered, as there; the calls of rollouts that the server recorded are trained on their own ids.

    Rollouts that failed are left out. Raises ConfigError for data without an example, and unless `skip_bad` for a faulty
    row and for a rollout without anything to train."""
    if isinstance(what, Trajectory | TrajectoryGroup):
        return _of_rollouts([what], model, skip_bad, Masking(filter))
    data = list(cast(Iterator[Rollout], what)) if isinstance(what, Iterator) else what
    first = data[0] if isinstance(data, Sequence) and not isinstance(data, str) and data else None
    if isinstance(first, Trajectory | TrajectoryGroup):
        return _of_rollouts(cast(Sequence[Rollout], data), model, skip_bad, Masking(filter))
    read = read_conversations(cast("str | Path | Rows", data), skip_bad=skip_bad, filter=filter)
    examples = tuple(_of_conversation(one, model) for one in read.conversations)
    return TrainingExamples(examples, read.skipped, read.redacted)


def _of_rollouts(items: Sequence[Rollout], model: str, skip_bad: bool, masking: Masking) -> TrainingExamples:
    flat: list[Trajectory] = []
    left_out = 0
    for item in as_list(items, "train_sft", "rollout"):
        flat += item.trajectories if isinstance(item, TrajectoryGroup) else [item]
        left_out += len(item.exceptions) if isinstance(item, TrajectoryGroup) else 0
    examples: list[TrainingExample] = []
    for number, trajectory in enumerate(flat):
        example = _of_trajectory(trajectory, model, f"trajectory {trajectory.id} (number {number})", masking)
        if trajectory.exception is not None:
            left_out += 1
        elif example is not None:
            examples.append(example)
        elif skip_bad:
            left_out += 1
        else:
            raise ConfigError(
                f"trajectory {trajectory.id} (number {number}) has no call and no message of the assistant to train on: "
                "leave it out, or skip such ones with skip_bad=True"
            )
    if not examples:
        raise ConfigError(f"train_sft: nothing to train on: {left_out} rollouts, all failed or empty")
    return TrainingExamples(tuple(examples), left_out, masking.count)


def _of_trajectory(trajectory: Trajectory, model: str, where: str, masking: Masking) -> TrainingExample | None:
    """The example of a rollout; None if there is nothing to train. Recorded calls are trained as they are, since their ids
    are what was sampled; an output that the app threw away is not."""
    record = trajectory_record(trajectory, model, where, RolloutPlace())
    unused = dict.fromkeys(record.unused, 0.0)
    histories = (trajectory, *trajectory.additional_histories)
    rendered = [told for history in histories if (told := _plain_answers(history)) is not None]
    if trajectory.captured:
        rendered = [
            RenderedHistory(messages=(*call.messages, output.message), tools=call.tools, targets=(len(call.messages),))
            for call in trajectory.outside_calls
            for output in call.outputs
            if output.message.get("role") == "assistant" and output.status.usable and call.id not in unused
        ]
    told = tuple(masking.rendered(history) for history in record.histories or rendered)
    recorded = trajectory.captured or bool(record.calls)
    if not recorded and not told:
        return None
    whole = record.model_copy(update={"histories": told, "weights": {**unused, **record.weights}})
    # Its id stands for recorded calls; what is rendered is its own description.
    identity = [record.id if recorded else None, whole.weights, [one.model_dump(mode="json") for one in told]]
    return TrainingExample(whole, recorded, _digest(identity))


def _plain_answers(history: History) -> RenderedHistory | None:
    """A history without choices: all its messages of the assistant are answers to train on."""
    entries = history.entries()
    if any(is_choice(item) for item in entries):
        return None  # its choices are trained, and other messages are context
    messages = tuple(cast(Message, message) for message in history.messages())
    targets = tuple(index for index, message in enumerate(messages) if message.get("role") == "assistant")
    tools = tuple(history.tools) if history.tools else None
    return RenderedHistory(messages=messages, tools=tools, targets=targets) if targets else None


def _of_conversation(conversation: Conversation, model: str) -> TrainingExample:
    targets = tuple(
        index
        for index, message in enumerate(conversation.messages)
        if message.get("role") == "assistant" and conversation.weights.get(index, 1.0) > 0
    )
    weights = tuple(conversation.weights.get(index, 1.0) for index in targets)
    told = RenderedHistory(
        messages=conversation.messages,
        tools=conversation.tools,
        targets=targets,
        weights=() if set(weights) <= {1.0} else weights,
        source=conversation.source,
    )
    digest = _digest(told.model_dump(mode="json", exclude={"source"}))
    now = time.time()
    metadata: dict[str, Json] = {"source": conversation.source}
    record = TrajectoryRecord(
        id=f"sft-{digest[:24]}",
        model=model,
        calls=(),
        histories=(told,),
        metadata=metadata,
        started_at=now,
        ended_at=now,
    )
    return TrainingExample(record, False, digest)


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
