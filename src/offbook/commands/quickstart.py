"""The command `offbook quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.server_options import EngineOptions
from offbook.plugins import imported

from .help_pages import more_option
from .options import Results


def quickstart(
    seed: Annotated[int, more_option(min=0, help="random seed for the training requests and their order")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="total number of training steps  [default: enough for the full gain]")
    ] = None,
    results: Results = None,
    output: Annotated[Path, typer.Option(help="folder for all output files")] = Path("offbook-quickstart"),
    engine: Annotated[str, more_option(help="inference engine: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, more_option(help="loader of the base for training: auto, peft or unsloth")] = "auto",
) -> None:
    """Train a LangGraph agent on this machine, in minutes.

    The agent answers questions from a SQLite database. Its success rate is printed before and after training."""
    engines = EngineOptions.parse(engine=engine, loader=loader)
    imported("offbook.quickstart.run", "quickstart").main(seed, steps, output, results, engines)
