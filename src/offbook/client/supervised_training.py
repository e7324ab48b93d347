"""Supervised training of a model: examples in batches, each one train request, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.types import RolloutPlace, TrainResult
from offbook.base.wire import GroupRecord, LogRequest, TrainEvent, TrainRequest, TrajectoryRecord

from .connection.http import Api
from .connection.progress import Bar
from .connection.train_stream import train
from .training_examples import TrainingExample, TrainingExamples

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
        """Whether the last `patience` evaluations are not below the best before them."""
        patience, losses = self.config.patience, [point.loss for point in self._held_out]
        if patience is None or len(losses) <= patience:
            return False
        return min(losses[-patience:]) >= min(losses[:-patience])

    def _note(self) -> str:
        parts = [f"loss={self._updates[-1].loss:.3g}"] if self._updates else []
        parts += [f"held-out={self._held_out[-1].loss:.3g}"] if self._held_out else []
        return " ".join(parts)
