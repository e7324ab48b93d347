"""The command `understudy doctor`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer
from rich.console import Console

from ..client.commands import server_folder
from ..command_options import Dir
from ..config import EngineOptions
from .examine import examine
from .memory import Planned, plan_checks, plans
from .page import as_json, console, show


def doctor_command(
    engine: Annotated[str, typer.Option(help="inference engine to check: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, typer.Option(help="loader to check: auto, peft or unsloth")] = "auto",
    dir: Dir = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    model: Annotated[
        str | None, typer.Option(help="base to plan GPU memory for: tiny, a folder, or a Hugging Face name")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="plan for a GPU with this memory, such as 24GB, and check nothing else")
    ] = None,
    memory_layout: Annotated[
        str, typer.Option(help="how sampler and learner share the GPU: auto, side_by_side, free_cache or offload")
    ] = "auto",
    row_tokens: Annotated[
        int | None, typer.Option(min=64, help="most tokens per row, `row_tokens` of the train config")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="calls decoded in one batch")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt plus completion, in tokens")] = None,
    max_lora_rank: Annotated[int, typer.Option(help="largest rank of a LoRA adapter")] = 16,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="the learner holds the base in 4 bits")] = False,
) -> None:
    """Check this machine, and name a fix for each fault.

    Checks hardware, packages, engine, server and services. With --model, also plan the GPU memory of that base. With
    --card, show only that plan. Exits with code 1 if the engine cannot run, or if the base does not fit on the card."""
    options = EngineOptions.parse(engine=engine, loader=loader)
    planned: list[Planned] = []
    if model is not None or card is not None:
        wanted = EngineOptions.parse(
            max_batch=max_batch,
            max_model_len=max_model_len,
            max_lora_rank=max_lora_rank,
            load_in_4bit=load_in_4bit,
        )
        planned = plans(model, card, wanted, row_tokens, memory_layout)
    if card is not None:
        _show_plans(planned, json)
        return
    folder = server_folder(dir)
    with Console(stderr=True).status("Asking torch and the engines ..."):
        report = examine(options, folder, more=plan_checks(planned))
    if json:
        typer.echo(as_json(report))
    else:
        show(report, console())
    if not report.ok:
        raise typer.Exit(1)


def _show_plans(planned: list[Planned], as_data: bool) -> None:
    if as_data:
        typer.echo(json_format.dumps([plan.as_json() for plan in planned], indent=1))
    else:
        typer.echo("\n".join(line for plan in planned for line in plan.lines()))
    if any(plan.plan is None for plan in planned):
        raise typer.Exit(1)
