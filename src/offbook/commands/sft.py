"""The command `offbook sft`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import RenderedHistory
from offbook.client.model import TrainableModel
from offbook.client.supervised_training import SFTResult, read_examples
from offbook.server.stored_models import DryRun, dry_run
from offbook.supervised.conversations import read_conversations

from .generated_options import with_options

SHOWN = 5
"""Faulty rows and messages that a dry run names."""


@with_options(SFTConfig)
def sft(
    data: Annotated[
        Path, typer.Argument(help="JSONL or JSON file of conversations, in the format of OpenAI's fine-tuning")
    ],
    base_model: Annotated[
        str, typer.Option("--base-model", "--base", help="base: tiny, tiny-mcp, a folder, or a Hugging Face name")
    ],
    model: Annotated[str | None, typer.Option(help="name of the trained model  [default: the file's name]")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="count tokens, time one update, and train nothing")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model on conversations: it learns to answer as their assistant.

    Each batch is a step. If Ctrl-C or a crash ends the command, the same command continues.

    \b
    Example:
      offbook sft conversations.jsonl --base-model Qwen/Qwen2.5-1.5B-Instruct --dry-run
    """
    config = SFTConfig.parse(**options)
    name = model or re.sub(r"[^A-Za-z0-9._-]+", "-", data.stem).strip("-._")
    trained = TrainableModel(name or "sft", base_model=base_model)
    if dry:
        echo("\n".join(dry_run_lines(data, trained, config)))
        return
    try:
        result = asyncio.run(trained.train_sft(data, config))
    except KeyboardInterrupt:
        echo("offbook: the batches so far are steps of the model; the same command continues from there", err=True)
        raise
    echo("\n".join(result_lines(result)))


def result_lines(result: SFTResult) -> list[str]:
    """What a training did, for a person."""
    lines = [
        f"{result.model}, step {result.step}: {len(result.updates):,} batches of {counted(result.examples, 'example')}"
        + f" ({result.resumed:,} of them by an earlier run)" * bool(result.resumed)
    ]
    if result.updates:
        first, last = result.updates[0], result.updates[-1]
        lines.append(f"loss      {first.loss:.3f} -> {last.loss:.3f} nats per token")
    if result.held_out:
        curve = " -> ".join(f"{point.loss:.3f}" for point in result.held_out[-6:])
        best = f", the lowest at step {result.best_step}" if result.best_step != result.step else ""
        stopped = ", which no longer fell" if result.stopped == "no_improvement" else ""
        lines.append(f"held out  {curve} nats per token{best}{stopped}")
    if result.skipped:
        lines.append(f"left out  {result.skipped:,} rows or messages that cannot be trained")
    if result.redacted:
        lines.append(f"masked    secrets in {counted(result.redacted, 'text')}")
    return lines


def dry_run_lines(data: Path, model: TrainableModel, config: SFTConfig) -> list[str]:
    """What the training would do. Raises ConfigError for data without an example, and for a faulty row unless it is skipped."""
    read = read_conversations(data, skip_bad=config.skip_bad)
    examples = read_examples(data, model.name, skip_bad=config.skip_bad)
    histories: list[RenderedHistory] = [history for one in examples.examples for history in one.record.histories]
    shared = set(TrainConfig.model_fields) & set(SFTConfig.model_fields) - {"learning_rate", "epochs"}
    settings = TrainConfig.parse(**config.model_dump(include=shared), loss="cross_entropy")
    report = dry_run(
        model.base_model, DryRun(histories=tuple(histories), config=settings, batch_size=config.batch_size)
    )
    faults = [*read.faults[:SHOWN], *report.skipped[:SHOWN]]
    if report.skipped and not config.skip_bad:
        raise ConfigError("\n".join([*report.skipped[:SHOWN], "leave such messages out with --skip-bad"]))
    if not report.examples:
        raise ConfigError("\n".join([*faults, f"{data}: nothing of it can be trained on this base"]))
    held = max(1, round(config.held_out * report.examples)) if config.held_out else 0
    batches = -(-(report.examples - held) // config.batch_size)
    per_epoch = report.seconds * report.trained / report.measured
    return [
        f"{data.name}: {counted(report.examples, 'conversation')}, {counted(report.messages, 'message')} to train",
        f"tokens    {report.trained:,} trained of {report.tokens:,} read; the longest row has {report.longest:,}",
        *([f"held out  about {counted(held, 'conversation')}"] if held else []),
        f"left out  {counted(read.skipped, 'row')} and {counted(len(report.skipped), 'message')} that cannot be trained",
        *[f"  {fault}" for fault in faults],
        f"masked    secrets in {counted(read.redacted, 'text')}",
        *([f"unread    fields that no conversation has: {', '.join(read.unread)}"] if read.unread else []),
        f"time      an update of {min(config.batch_size, report.examples)} conversations took {report.seconds:.2g} s here: "
        f"about {per_epoch * config.epochs:.2g} s for {batches * config.epochs:,} batches in "
        f"{counted(config.epochs, 'epoch')}, without the start",
    ]
