"""The commands `offbook checkpoints` and `offbook export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.client.commands import convert_command, export_model, list_checkpoints

from .options import Dir, Model, Server


def checkpoints(model: Model, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    listed = list_checkpoints(model, url, dir)
    for checkpoint in listed:
        typer.echo(f"{checkpoint.step:5}  {checkpoint.path}")
    if not listed:
        typer.echo(f"model {model!r} is at step 0: nothing has been trained yet, so it has no checkpoints", err=True)


def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="new folder on this machine")],
    format: Annotated[
        str,
        typer.Option(
            help="peft: the LoRA; merged: base and LoRA in one model; gguf-ready: the merged model for llama.cpp's converter"
        ),
    ] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="step of the checkpoint  [default: the newest]")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that other tools load.

    The tools are vLLM, transformers and llama.cpp's converter. With --url, the checkpoint is downloaded."""
    written = export_model(model, output, format, step, url, dir)
    typer.echo(written)
    if format == "gguf-ready":
        typer.echo(f"to convert it to one GGUF file: {convert_command(written)}", err=True)
