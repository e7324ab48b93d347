"""`offbook mcp explore` and `offbook mcp scenarios`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import one_line
from offbook.commands.help_pages import more_option
from offbook.llms.ledger import budget
from offbook.llms.llm import Llm
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.scenarios.explore import explore as explored
from offbook_mcp.scenarios.files import save_scenarios
from offbook_mcp.scenarios.from_llm import questions_for
from offbook_mcp.scenarios.generate import generate_scenarios

from . import scenario_reports as reports

Seed = Annotated[int, more_option(help="random seed for values and tasks")]


def explore(target: Target, seed: Seed = 0) -> None:
    """Call the tools that only read, and show what they return.

    Also reads the server's resources.
    """
    asyncio.run(_explore(target, seed))


async def _explore(target: Target, seed: int) -> None:
    async with ServerPool(target, ahead=1) as pool:
        exploration = await explored(pool, seed=seed)
        echo("\n".join(reports.explored(pool, exploration)))


def scenarios(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write")] = Path("scenarios.jsonl"),
    count: Annotated[int, typer.Option(min=1, help="number of scenarios")] = 48,
    llm: Annotated[
        str | None,
        typer.Option(help="LLM that writes the scenarios, such as openai/gpt-4.1  [default: generated offline]"),
    ] = None,
    api_base: Annotated[
        str | None,
        more_option("--llm-api-base", "--api-base", help="with --llm: URL of an OpenAI-compatible endpoint"),
    ] = None,
    max_cost: Annotated[float | None, more_option(help="with --llm: spending limit, in USD")] = None,
    max_difficulty: Annotated[
        int, more_option(min=1, max=5, help="hardest scenarios to generate: 1 (one value) to 5 (three calls)")
    ] = 5,
    seed: Seed = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="connect and print the plan, call no tool")] = False,
) -> None:
    """Generate scenarios for training and evaluation, and run each one twice to check it."""
    if llm is None and (api_base or max_cost):
        raise ConfigError("--llm-api-base, --max-cost: they apply to --llm only: add --llm MODEL, or leave them out")
    if dry_run:
        asyncio.run(_planned(target, count, llm, output))
    else:
        with budget(max_cost) as spent:
            writer = None if llm is None else Llm(llm, **({"api_base": api_base} if api_base else {}))
            asyncio.run(_made(target, output, count, seed, writer, max_difficulty))
        if llm is not None:
            echo("\n".join(spent.lines()))


async def _planned(target: Target, count: int, llm: str | None, output: Path) -> None:
    async with ServerPool(target, ahead=0) as pool:
        questions = 0 if llm is None else questions_for(count)
        echo("\n".join(reports.planned(pool, count, questions, str(output))))


async def _made(target: Target, output: Path, count: int, seed: int, llm: Llm | None, max_difficulty: int) -> None:
    scenario_set = await generate_scenarios(
        target,
        count=count,
        seed=seed,
        llm=llm,
        max_difficulty=max_difficulty,
        progress=lambda line: echo(one_line(line, 300), err=True),
    )
    save_scenarios(scenario_set, output)
    echo("\n".join(reports.made(scenario_set, count, output)))
    echo(f"written to {one_line(str(output))}, sha256 {scenario_set.digest[:16]}")
