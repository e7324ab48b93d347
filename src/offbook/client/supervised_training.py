"""Supervised training of a model: rollouts, or conversations of others, as records for the server, in batches that are one train request
each, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, cast

from offbook.base.choices import is_choice
from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.types import (
    History,
    Json,
    Message,
    RenderedHistory,
    RolloutPlace,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
)
from offbook.base.user_values import as_list
from offbook.base.wire import GroupRecord, LogRequest, TrainEvent, TrainRequest, TrajectoryRecord
from offbook.supervised.conversations import Conversation, Rows, read_conversations
from offbook.supervised.masking import Masking, TextFilter

from .connection.http import Api
from .connection.progress import Bar
from .connection.train_stream import train
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


logger = logging.getLogger("offbook")

HELD_OUT = "held-out"
"""Split of the examples that are measured and not trained."""


@dataclass(frozen=True)
class SFTUpdate:
    """One batch. `loss`: mean cross-entropy per trained token before its update, nats. `step`: the model's afterwards."""

    step: int
    epoch: int
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean cross-entropy per token of the held-out examples at a step, in nats."""

    step: int
    loss: float


@dataclass(frozen=True)
class SFTResult:
    """What a supervised training did. `skipped`: examples and messages that were left out; `redacted`: texts in which
    secrets were masked; `resumed`: updates that an earlier call had applied. `stopped`: at the end of the epochs, or
    because the held-out loss no longer fell."""

    model: str
    step: int
    request_id: str
    updates: tuple[SFTUpdate, ...]
    held_out: tuple[HeldOutLoss, ...] = ()
    examples: int = 0
    skipped: int = 0
    redacted: int = 0
    resumed: int = 0
    stopped: str = "trained"
    warnings: tuple[str, ...] = ()

    @property
    def loss(self) -> float | None:
        """The loss of the last batch; None if nothing was trained."""
        return self.updates[-1].loss if self.updates else None

    @property
    def best_step(self) -> int:
        """The step with the lowest held-out loss, the earliest of several; without held-out examples, the last."""
        return min(self.held_out, key=lambda point: point.loss).step if self.held_out else self.step


def rate_at(config: SFTConfig, update: int, updates: int) -> float:
    """The learning rate of one update, 0 <= `update` < `updates`: a linear warm-up, then the schedule towards 0.

    >>> config = SFTConfig(learning_rate=1.0, warmup=0.25, schedule="linear")
    >>> [round(rate_at(config, update, 8), 3) for update in range(8)]
    [0.5, 1.0, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167]
    """
    if isinstance(config.learning_rate, tuple):
        return config.learning_rate[min(update, len(config.learning_rate) - 1)]
    warmup = math.ceil(config.warmup * updates)
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    done = (update - warmup) / (updates - warmup)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[config.schedule]
    return config.learning_rate * factor


def split(
    examples: Sequence[TrainingExample], share: float, seed: int
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """The examples to train and those to hold out: about `share` of all, at least one if it is above 0. Equal ones stay together."""
    if not share:
        return list(examples), []
    digests = sorted({example.digest for example in examples})
    random.Random(f"held out {seed}").shuffle(digests)
    held = set(digests[: min(max(1, round(share * len(digests))), len(digests) - 1)])
    trained = [example for example in examples if example.digest not in held]
    return trained, [example for example in examples if example.digest in held]


def request_prefix(examples: Sequence[TrainingExample], config: SFTConfig, model: str) -> str:
    """The beginning of the ids of a training's requests. The same model, examples and options have the same."""
    told = [model, config.model_dump(mode="json"), [example.digest for example in examples]]
    return f"sft-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]}"


@dataclass
class SupervisedTraining:
    """One call of `train_sft`, on a server that knows the model. `prefix`: begins the ids of its requests and records.
    `finished`: ids of the records that the server has."""

    api: Api
    model: str
    config: SFTConfig
    prefix: str
    on_event: Callable[[TrainEvent], None] | None = None
    timeout: float | None = None
    finished: set[str] = field(default_factory=set[str])
    _updates: list[SFTUpdate] = field(default_factory=list[SFTUpdate])
    _held_out: list[HeldOutLoss] = field(default_factory=list[HeldOutLoss])
    _warnings: dict[str, None] = field(default_factory=dict[str, None])
    _resumed: int = 0
    _skipped: int = 0
    _step: int = 0

    async def run(self, examples: TrainingExamples, bar: Bar) -> SFTResult:
        """Train all epochs. Raises as `Backend.train`; batches that were applied stay, and the same call goes on."""
        numbered = [replace(one, record=self._named(one, number)) for number, one in enumerate(examples.examples)]
        trained, held_out = split(numbered, self.config.held_out, self.config.seed)
        size = self.config.batch_size
        batches = [
            (epoch, order[start : start + size])
            for epoch in range(self.config.epochs)
            for order in [self._order(trained, epoch)]
            for start in range(0, len(order), size)
        ]
        every = self.config.evaluate_every or -(-len(trained) // size)
        self._step = (await self.api.model(self.model)).step
        stopped = "trained"
        await self._measure(held_out, 0)
        for number, (epoch, batch) in enumerate(batches):
            bar.update(number, len(batches), self._note(), f"epoch {epoch + 1}")
            rate = rate_at(self.config, number, len(batches))
            await self._train(number, epoch, batch, rate)
            if (number + 1) % every == 0 or number + 1 == len(batches):
                await self._measure(held_out, number + 1)
                if self._no_improvement():
                    stopped = "no_improvement"
                    break
        bar.update(len(self._updates), len(batches), self._note())
        if self._resumed and self._resumed == len(self._updates):
            logger.warning(
                "all %d batches were applied by an earlier call with the same examples and options: to train on them again, "
                "give another seed= or request_id=",
                self._resumed,
            )
        return SFTResult(
            *(self.model, self._step, self.prefix, tuple(self._updates), tuple(self._held_out), len(trained)),
            skipped=examples.skipped + self._skipped,
            redacted=examples.redacted,
            resumed=self._resumed,
            stopped=stopped,
            warnings=tuple(self._warnings),
        )

    def _named(self, example: TrainingExample, number: int) -> TrajectoryRecord:
        """The record under an id that a repeated call finds again; one with recorded calls keeps its own."""
        if example.recorded:
            return example.record
        return example.record.model_copy(update={"id": f"{self.prefix}-{number:06d}"})

    def _order(self, examples: Sequence[TrainingExample], epoch: int) -> list[TrainingExample]:
        order = list(examples)
        if self.config.shuffle:
            random.Random(f"epoch {epoch} of {self.config.seed}").shuffle(order)
        return order

    async def _train(self, number: int, epoch: int, batch: Sequence[TrainingExample], rate: float) -> None:
        config = self._config(rate)
        result, known = await self._request(f"{self.prefix}-{epoch}-{number}", batch, config, "train")
        self._resumed += known
        self._skipped += int(result.metrics.get("calls/skipped", 0)) if epoch == 0 else 0
        self._step = max(self._step, result.step)
        loss = result.metrics.get("loss/cross_entropy", math.nan)
        self._updates.append(SFTUpdate(result.step, epoch, loss, rate))

    async def _measure(self, examples: Sequence[TrainingExample], updates: int) -> None:
        """Append the held-out loss after so many updates, and log it with the model."""
        if not examples:
            return
        request_id = f"{self.prefix}-{HELD_OUT}-{updates}"
        result, known = await self._request(request_id, examples, self._config(1e-5), HELD_OUT)
        loss = result.metrics["loss/cross_entropy"]
        self._held_out.append(HeldOutLoss(result.step, loss))
        if not known:
            metrics = {f"{HELD_OUT}/{name}": result.metrics[f"loss/{name}"] for name in ("cross_entropy", "perplexity")}
            ids = tuple(example.record.id for example in examples)
            log = LogRequest(split=HELD_OUT, step=result.step, metrics=metrics, trajectory_ids=ids)
            await self.api.log(self.model, log)

    async def _request(
        self, request_id: str, examples: Sequence[TrainingExample], config: TrainConfig, part: str
    ) -> tuple[TrainResult, bool]:
        """The result of one request, and whether it was known already."""
        status = await self.api.train_status(request_id)
        known = status is not None and status.result is not None
        result = status.result if status is not None else None
        if result is None:
            place = RolloutPlace(run=self.prefix, split=part, step=self._step)
            new = [one.record for one in examples if one.record.id not in self.finished]
            await self.api.finish([record.model_copy(update={"place": record.place.filled(place)}) for record in new])
            groups = tuple(GroupRecord(trajectory_ids=(one.record.id,)) for one in examples)
            request = TrainRequest(
                id=request_id, model=self.model, groups=groups, config=config, evaluate=part == HELD_OUT
            )
            result = await train(self.api, request, on_event=self.on_event, timeout=self.timeout)
        self.finished |= {one.record.id for one in examples}
        self._warnings |= dict.fromkeys(result.warnings)
        for warning in result.warnings if not known else ():
            logger.warning("%s", warning)
        return result, known

    def _config(self, rate: float) -> TrainConfig:
        taken = self.config.model_dump(include=set(TrainConfig.model_fields) & set(SFTConfig.model_fields))
        return TrainConfig.parse(**taken | {"loss": "cross_entropy", "learning_rate": rate, "epochs": 1})

    def _no_improvement(self) -> bool:
        patience, losses = self.config.patience, [point.loss for point in self._held_out]
        if patience is None or len(losses) <= patience:
            return False
        return min(losses[-patience:]) >= min(losses[:-patience])

    def _note(self) -> str:
        parts = [f"loss={self._updates[-1].loss:.3g}"] if self._updates else []
        parts += [f"held-out={self._held_out[-1].loss:.3g}"] if self._held_out else []
        return " ".join(parts)
