"""The command `offbook doctor`: its report as text and as JSON, and the memory plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbook.base.console import Terminal
from offbook.base.devices import gpus
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, MemoryLayout, server_folder
from offbook.base.terminal import echo
from offbook.base.types import Json
from offbook.doctor import Check, Report, Status, examine
from offbook.memory_plan.parts import LAYOUTS, Card, Workload, find_shape, parse_card
from offbook.memory_plan.plan import (
    MemoryPlan,
    headline,
    make_plan,
    plan_json,
    plan_lines,
)

from .help_pages import more_option
from .options import Dir

COMMON = ("16GB", "24GB", "48GB", "80GB")
"""Cards that are planned for on a machine without a GPU."""


@dataclass(frozen=True)
class Planned:
    """The plan for a card. `plan` is None where the base does not fit; `refused` then names the setting to change."""

    card: Card
    plan: MemoryPlan | None
    refused: str = ""

    def lines(self) -> list[str]:
        """The plan as text."""
        return [self.refused] if self.plan is None else plan_lines(self.plan)

    def as_json(self) -> dict[str, Json]:
        """The plan as JSON."""
        if self.plan is None:
            return {"card": self.card.name, "refused": self.refused}
        return plan_json(self.plan)


def plans(
    model: str | None,
    card: str | None,
    options: EngineOptions,
    row_tokens: int | None,
    layout: str = "auto",
) -> list[Planned]:
    """A plan per card. Raises ConfigError for a base that cannot be read or planned, and for an unknown layout."""
    known: dict[str, MemoryLayout | Literal["auto"]] = {"auto": "auto", **{name: name for name in LAYOUTS}}
    if layout not in known:
        raise ConfigError(f"--memory-layout {layout!r} is unknown: use one of auto, {', '.join(LAYOUTS)}")
    if model is None:
        raise ConfigError("--card needs --model, the base to run, as in --model Qwen/Qwen2.5-7B-Instruct")
    here = [parse_card(card)] if card is not None else [Card(gpu.name, gpu.total) for gpu in gpus()[:1]]
    shape, work = find_shape(model), Workload.of(options, row_tokens)
    planned: list[Planned] = []
    for gpu in here or map(parse_card, COMMON):
        try:
            planned.append(Planned(gpu, make_plan(model, shape, gpu, work, known[layout])))
        except ConfigError as error:
            planned.append(Planned(gpu, None, str(error)))
    return planned


def plan_checks(planned: list[Planned]) -> list[Check]:
    """One check per plan: the whole plan if there is one, else its headline."""
    checks: list[Check] = []
    for result in planned:
        if result.plan is None:
            checks.append(Check("memory", result.card.name, "warn", result.refused))
        else:
            shown = [headline(result.plan)] if len(planned) > 1 else result.lines()
            checks.append(Check("memory", result.card.name, "ok", "\n".join(shown)))
    return checks


TITLES = {
    "machine": "This machine",
    "engine": "Engine",
    "memory": "Memory",
    "packages": "Packages",
    "server": "Server",
}
"""Section of a check -> its heading, in the order of the report."""
_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warn": ("!", "!", "yellow"),
    "missing": ("·", "-", "dim"),
    "broken": ("✗", "X", "bold red"),
}
"""Status -> mark, mark on a terminal with ASCII only, style."""
_WIDTH = 120
_NAMES = 17


def as_json(report: Report) -> str:
    """The checks, the overall result, and the engine and loader to use, as JSON."""
    checks = [asdict(check) for check in report.checks]
    return json.dumps({"ok": report.ok, "engine": report.engine, "loader": report.loader, "checks": checks}, indent=1)


def show(report: Report, console: Console) -> None:
    """Print the report, a block per section. A fix stands under its fault."""
    fancy = console.encoding.lower().startswith("utf")
    for section, title in TITLES.items():
        checks = [check for check in report.checks if check.section == section]
        if not checks:
            continue
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(width=_NAMES)
        table.add_column(overflow="fold")
        for check in checks:
            table.add_row(*_row(check, fancy))
        console.print(Text(title, style="bold"))
        console.print(table)
    console.print(_verdict(report))


def console() -> Console:
    """The console of standard output. In a file or a pipe it is wide, so that lines stay whole."""
    terminal = Terminal(highlight=False)
    return terminal if terminal.is_terminal else Terminal(highlight=False, width=_WIDTH)


def _row(check: Check, fancy: bool) -> tuple[Text, Text, Text]:
    mark, plain, style = _MARKS[check.status]
    text = Text(check.found, style="dim" if check.status == "missing" else "")
    if check.fix is not None:
        text.append(": " if check.status == "missing" else "\n").append(check.fix, style="cyan")
    return Text(mark if fancy else plain, style=style), Text(check.name), text


def _verdict(report: Report) -> Text:
    if not report.ok:
        broken = ", ".join(check.name for check in report.checks if check.status == "broken")
        return Text(f"Broken: {broken}", style="bold red")
    if report.engine is None:
        return Text("Ready as a client: set OFFBOOK_URL to the URL of a server", style="bold green")
    return Text(f"Ready: engine {report.engine}, loader {report.loader}", style="bold green")


def doctor_command(
    engine: Annotated[str, more_option(help="inference engine to check: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, more_option(help="loader to check: auto, peft or unsloth")] = "auto",
    dir: Dir = None,
    as_data: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    model: Annotated[
        str | None, typer.Option(help="base to plan GPU memory for: tiny, a folder, or a Hugging Face name")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="plan for a GPU with this memory, such as 24GB, and check nothing else")
    ] = None,
    memory_layout: Annotated[
        str, more_option(help="how sampler and learner share the GPU: auto, side_by_side, free_cache or offload")
    ] = "auto",
    row_tokens: Annotated[
        int | None, more_option(min=64, help="most tokens per row, `row_tokens` of the train config")
    ] = None,
    max_batch: Annotated[int | None, more_option(help="most calls decoded in one batch")] = None,
    max_model_len: Annotated[int | None, more_option(help="longest prompt plus completion, in tokens")] = None,
    max_lora_rank: Annotated[int, more_option(help="largest rank of a LoRA adapter")] = 16,
    load_in_4bit: Annotated[bool, more_option("--load-in-4bit", help="load the learner's base in 4 bits")] = False,
) -> None:
    """Check this machine, and suggest a fix for each problem.

    Checks hardware, packages, engine and server. With --model, also plan the GPU memory of that base. With
    --card, show only that plan. Exits with code 1 if the engine cannot run, or if the base does not fit."""
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
        _show_plans(planned, as_data)
    else:
        _examine(options, server_folder(dir), planned, as_data)


def _examine(options: EngineOptions, folder: Path, planned: list[Planned], as_data: bool) -> None:
    with Terminal(stderr=True).status("Asking torch and the engines ..."):
        report = examine(options, folder, more=plan_checks(planned))
    if as_data:
        echo(as_json(report))
    else:
        show(report, console())
    if not report.ok:
        raise typer.Exit(1)


def _show_plans(planned: list[Planned], as_data: bool) -> None:
    if as_data:
        echo(json.dumps([plan.as_json() for plan in planned], indent=1))
    else:
        echo("\n".join(line for plan in planned for line in plan.lines()))
    if any(plan.plan is None for plan in planned):
        raise typer.Exit(1)
