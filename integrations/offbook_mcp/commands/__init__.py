"""Inspect an MCP server, and train a model to use its tools."""

from __future__ import annotations

import asyncio
import json as json_format
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted, one_line, printable
from offbook.commands.help_pages import more_option
from offbook.llms.ledger import budget
from offbook.llms.llm import Llm
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.scenarios.execution import Exploration
from offbook_mcp.scenarios.explore import explore as explore_server
from offbook_mcp.scenarios.generate import few_held_out, generate_scenarios
from offbook_mcp.scenarios.scenario import ScenarioSet, save_scenarios

from .options import on_target
from .training import add_training_commands, writer_at

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def tools(
    target: Target,
    json: Annotated[bool, typer.Option("--json", help="print JSON, with the schemas that the model gets")] = False,
) -> None:
    """List the server's tools as the model sees them, and which may be called."""
    echo(asyncio.run(_listing(target, json)))


async def _listing(target: Target, json: bool) -> str:
    async with ServerPool(target, ahead=0) as pool:
        return json_format.dumps(_as_json(pool), indent=1) if json else "\n".join(_lines(pool))


def _lines(pool: ServerPool) -> Iterator[str]:
    """The listing as text. Every text of the server is escaped."""
    for server in pool.servers:
        identity = " ".join(part for part in (server.title, server.version) if part)
        yield f"{one_line(server.name)}: {one_line(identity) or 'without a name'}, protocol {one_line(server.protocol)}"
    yield f"fingerprint {pool.fingerprint}; {pool.sharing()}"
    yield ""
    width = max(len(tool.name) for tool in pool.offered.tools)
    for tool in pool.offered.tools:
        kind = (pool.toolset.find(tool.name) or tool).tool.kind
        yield f"{tool.name:{width}}  {kind:7} {tool.shown_arguments()}"
        if tool.tool.description:
            yield f"{'':{width}}          {one_line(tool.tool.description, 100)}"
        for name, value in tool.bound.items():
            yield f"{'':{width}}          bound: {name} = {printable(str(value))}"
    if pool.toolset.left_out:
        yield ""
        yield "Not called:"
        yield from (f"  {one_line(name, 64)}: {one_line(reason)}" for name, reason in pool.toolset.left_out.items())
    if pool.toolset.changes:
        yield ""
        yield "Renamed for the model:"
        yield from (f"  {one_line(change)}" for change in pool.toolset.changes)


def _as_json(pool: ServerPool) -> dict[str, object]:
    """The listing as JSON: servers, fingerprint, and every tool with the schema that the model gets."""
    return {
        "servers": [
            {"name": server.name, "title": server.title, "version": server.version, "protocol": server.protocol}
            for server in pool.servers
        ],
        "fingerprint": pool.fingerprint,
        "shared": list(pool.shared),
        "tools": [
            tool.function()["function"] | {"server": tool.tool.server, "kind": tool.tool.kind.value}
            for tool in pool.offered.tools
        ],
        "left_out": dict(pool.toolset.left_out),
        "changes": list(pool.toolset.changes),
    }


Seed = Annotated[int, more_option(help="random seed for values and tasks")]


def explore(target: Target, seed: Seed = 0) -> None:
    """Call the tools that only read, and show what they return."""
    asyncio.run(_explore(target, seed))


async def _explore(target: Target, seed: int) -> None:
    async with ServerPool(target, ahead=1) as pool:
        exploration = await explore_server(pool, seed=seed)
        echo("\n".join(exploration_lines(pool, exploration)))


def scenarios(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write")] = Path("scenarios.jsonl"),
    count: Annotated[int, more_option(min=1, help="number of scenarios")] = 48,
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
) -> None:
    """Generate scenarios for training and evaluation, and run each one twice to check it."""
    if llm is None and (api_base or max_cost):
        raise ConfigError("--llm-api-base, --max-cost: they apply to --llm only: add --llm MODEL, or leave them out")
    writer = writer_at(llm, api_base)
    with budget(max_cost) as spent:
        asyncio.run(_made(target, output, count, seed, writer, max_difficulty))
    if llm is not None:
        echo("\n".join(spent.lines()))


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
    echo("\n".join(_result_lines(scenario_set, count, output)))
    echo(f"written to {one_line(str(output))}, sha256 {scenario_set.digest[:16]}")


_EXAMPLES = 3
_MAX_PLACES = 20


def exploration_lines(pool: ServerPool, exploration: Exploration) -> Iterator[str]:
    """The lines of `explore`: calls and results per tool, values by place, and what is left out."""
    yield f"fingerprint {pool.fingerprint}; {counted(len(exploration.observations), 'call')}"
    for tool in pool.toolset.tools:
        seen = exploration.of(tool.name)
        if not seen:
            continue
        answered = sum(observation.worked for observation in seen)
        empty = sum(observation.empty for observation in seen)
        errors = len(seen) - answered - empty
        yield ""
        yield f"{tool.name}: {answered} answered, {empty} empty, {errors} refused"
        for observation in [observation for observation in seen if observation.worked][:_EXAMPLES]:
            yield f"  {one_line(repr(dict(observation.arguments)), 100)} -> {one_line(observation.text, 100)}"
        if error := exploration.first_error(tool.name):
            yield f"  {'refused' if errors else 'empty'}, such as {error}"
    places = list(exploration.sampler.places.items())
    if places:
        yield ""
        yield "Values that other calls can use:"
        for place, values in places[:_MAX_PLACES]:
            some = ", ".join(one_line(str(value), 40) for value in list(values)[:_EXAMPLES])
            yield f"  {one_line(place, 60)}: {len(values)}, such as {some}"
        if len(places) > _MAX_PLACES:
            yield f"  and {len(places) - _MAX_PLACES} more places"
    if exploration.left_out:
        yield ""
        yield "Left out:"
        yield from (f"  {one_line(name, 80)}: {one_line(why)}" for name, why in exploration.left_out.items())


def _result_lines(scenarios: ScenarioSet, wanted: int, output: Path) -> Iterator[str]:
    """The lines of `scenarios`: counts, a few tasks, and why candidates were dropped. `wanted`: how many were asked for."""
    total = len(scenarios.scenarios)
    fewer = f" ({wanted} were asked for)" if total < wanted else ""
    yield f"{counted(total, 'scenario')}{fewer}: {len(scenarios.train)} to train, {len(scenarios.eval)} held out"
    if few := few_held_out(scenarios, wanted, one_line(str(output))):
        yield few
    difficulties = Counter(scenario.difficulty for scenario in scenarios.scenarios)
    checks = Counter(scenario.check.value for scenario in scenarios.scenarios)
    yield "difficulty " + ", ".join(f"{level}: {number}" for level, number in sorted(difficulties.items()))
    yield "checked by " + ", ".join(f"{kind}: {number}" for kind, number in sorted(checks.items()))
    train = Counter(tool for scenario in scenarios.train for tool in scenario.tools)
    held_out = Counter(tool for scenario in scenarios.eval for tool in scenario.tools)
    for tool in sorted(train | held_out):
        yield f"  {one_line(tool, 64)}: {train[tool]} to train, {held_out[tool]} held out"
    for scenario in scenarios.scenarios[:_EXAMPLES]:
        yield f"  {one_line(scenario.task, 160)}"
    if scenarios.dropped:
        ranked = sorted(scenarios.dropped.items(), key=lambda item: (-item[1], item[0]))
        yield "dropped: " + "; ".join(f"{number} {one_line(reason)}" for reason, number in ranked)
        yield from (f"  {one_line(reason)}, such as {one_line(text)}" for reason, text in scenarios.examples.items())


app.command("tools")(on_target(tools, calls_tools=False))
app.command("explore")(on_target(explore))
app.command("scenarios")(on_target(scenarios))
add_training_commands(app)
