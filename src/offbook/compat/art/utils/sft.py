"""Supervised training as OpenPipe ART calls it: chunks of batches, a list of rates, JSONL files."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pydantic import Field, model_validator

from offbook.base.config import SFTConfig
from offbook.base.errors import ConfigError
from offbook.base.types import MessageOrChoice, Trajectory
from offbook.client.model import TrainableModel
from offbook.supervised.conversations import read_conversations

__all__ = [
    "SFTChunk",
    "TrainSFTConfig",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "get_file_row_count",
    "iterate_file",
    "resolve_sft_batch_size",
    "train_sft_from_file",
]

logger = logging.getLogger("offbook")
Schedule = Literal["cosine", "linear", "constant"]
AUTO_BATCH = 2
LEAST_RATE = 1e-12
"""In place of the rate 0 with which ART's schedules end."""


class TrainSFTConfig(SFTConfig):
    """ART's options of one `train_sft`: a rate or one for each batch, a batch size or "auto". Batches keep their order."""

    learning_rate: float | tuple[float, ...] = Field(default=5e-5, description="the rate, or a list with each update's")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="constant", description="as in SFTConfig")
    warmup: float = Field(default=0.0, ge=0, lt=1, description="as in SFTConfig")
    batch_size: int = Field(default=AUTO_BATCH, ge=1, description='trajectories of one update; "auto": 2')
    shuffle: bool = Field(default=False, description="as in SFTConfig")

    @model_validator(mode="before")
    @classmethod
    def _as_here(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        taken = dict(cast(dict[str, Any], values))
        if taken.get("batch_size") == "auto":
            taken["batch_size"] = AUTO_BATCH
        rates = taken.get("learning_rate")
        if isinstance(rates, list | tuple):
            taken["learning_rate"] = tuple(max(rate, LEAST_RATE) for rate in cast(list[float], rates))
        return taken


class SFTChunk(NamedTuple):
    """The trajectories of one call of `train_sft`, its options, and where it begins: batch of all, epoch, batch of it."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    epoch: int
    epoch_step: int


def resolve_sft_batch_size(*, batch_size: int | Literal["auto"], default_batch_size: int) -> int:
    """The batch size, or the default for "auto"."""
    return default_batch_size if batch_size == "auto" else batch_size


def get_file_row_count(file_path: str) -> int:
    """Rows of a JSONL file that are not empty. Raises ConfigError for another kind of file."""
    with _jsonl(file_path).open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """The rate of each step: a linear warm-up to the peak, then constant, or down to `min_lr` at the last step.

    >>> create_lr_schedule(5, 1.0, warmup_steps=2)
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rates: list[float] = []
    for step in range(total_steps):
        done = (step - warmup_steps) / max(total_steps - warmup_steps - 1, 1)
        shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
        if method not in shapes:
            raise ConfigError(f"method: {method!r} must be one of {', '.join(shapes)}")
        share = (step + 1) / warmup_steps if step < warmup_steps else shapes[method]
        rates.append(min_lr + (peak_lr - min_lr) * share)
    return rates


def create_sft_dataset_iterator(
    trajectories: list[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """Chunks of `chunk_size` batches for calls of `model.train_sft`, with the rates of one schedule over all epochs.

    `initial_step`: the batch to go on from; whole chunks before it are left out. Each call shows its own progress."""
    del show_progress
    if chunk_size < 1:
        raise ConfigError(f"chunk_size: 1 or more is needed, got {chunk_size!r}")
    batches = math.ceil(len(trajectories) / batch_size)
    rates = create_lr_schedule(batches * epochs, peak_lr, schedule_type, int(batches * epochs * warmup_ratio))
    first, number = initial_step // chunk_size, 0
    for epoch in range(epochs):
        order = list(trajectories)
        if shuffle:
            random.Random(seed + epoch).shuffle(order)
        for start in range(0, batches, chunk_size):
            number += 1
            if number <= first:
                continue
            step, count = epoch * batches + start, min(chunk_size, batches - start)
            # The seed makes each chunk a training of its own, also where its examples come a second time.
            config = TrainSFTConfig(
                learning_rate=tuple(rates[step : step + count]), batch_size=batch_size, seed=seed + step
            )
            chosen = order[start * batch_size : (start + count) * batch_size]
            yield SFTChunk(chosen, config, step, epoch, start)


def iterate_file(
    file_path: str, epochs: int = 1, shuffle_buffer_size: int = 10_000, seed: int = 42, initial_skip: int = 0
) -> Iterator[Trajectory]:
    """The conversations of a JSONL file, in another order in each epoch. A buffer of 1 keeps the order.

    Raises ConfigError that names each faulty row."""
    conversations = read_conversations(_jsonl(file_path)).conversations
    skipped = 0
    for epoch in range(epochs):
        order, draw = list(conversations), random.Random(seed + epoch)
        if shuffle_buffer_size > 1:
            draw.shuffle(order)
        for conversation in order:
            skipped += 1
            if skipped > initial_skip:
                items = cast(list[MessageOrChoice], list(conversation.messages))
                tools = None if conversation.tools is None else list(conversation.tools)
                yield Trajectory(messages_and_choices=items, tools=tools)


async def train_sft_from_file(
    model: TrainableModel[Any],
    file_path: str,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: dict[str, object] | None = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10_000,
    log_metrics: bool = True,
) -> None:
    """Train on a JSONL file, from batch `initial_step` up to `final_step`, with one schedule over all epochs."""
    rows = get_file_row_count(file_path)
    batches = math.ceil(rows * epochs / batch_size)
    rates = create_lr_schedule(batches, peak_lr, schedule_type, int(batches * warmup_ratio))[initial_step:final_step]
    if not rates:
        logger.warning("%s: initial_step=%d leaves nothing of its %d batches", file_path, initial_step, batches)
        return
    skip = initial_step * batch_size
    examples = iterate_file(file_path, epochs, shuffle_buffer_size, initial_skip=skip)
    config = TrainSFTConfig(learning_rate=tuple(rates), batch_size=batch_size)
    chosen = list(itertools.islice(examples, len(rates) * batch_size))
    await model.train_sft(chosen, config, _config=_config, verbose=verbose, log_metrics=log_metrics)


def _jsonl(file_path: str) -> Path:
    if not file_path.endswith(".jsonl"):
        raise ConfigError(f"only .jsonl files are read, got {file_path!r}")
    return Path(file_path)
