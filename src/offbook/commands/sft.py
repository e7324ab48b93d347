"""The command `offbook sft`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook.base.config import SFTConfig
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.client.model import TrainableModel
from offbook.client.supervised_training import SFTResult

from .generated_options import with_options


@with_options(SFTConfig)
def sft(
    data: Annotated[
        Path, typer.Argument(help="JSONL or JSON file of conversations, in the format of OpenAI's fine-tuning")
    ],
    base_model: Annotated[
        str, typer.Option("--base-model", "--base", help="base: tiny, tiny-mcp, a folder, or a Hugging Face name")
    ],
    model: Annotated[str | None, typer.Option(help="name of the trained model  [default: the file's name]")] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model on conversations: it learns to answer as their assistant.

    Each batch is a step. If Ctrl-C or a crash ends the command, the same command continues.

    \b
    Example:
      offbook sft conversations.jsonl --base-model Qwen/Qwen2.5-1.5B-Instruct
    """
    config = SFTConfig.parse(**options)
    name = model or re.sub(r"[^A-Za-z0-9._-]+", "-", data.stem).strip("-._")
    trained = TrainableModel(name or "sft", base_model=base_model)
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
