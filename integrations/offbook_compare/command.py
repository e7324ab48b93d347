"""The command `offbook compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.help_pages import more_option
from offbook.commands.option_values import judge_option, model_option
from offbook.commands.options import JudgeOptions, ModelOptions
from offbook.scenarios.loading import load_scenarios

from .comparison import compare
from .options import CompareOptions
from .report import result_lines
from .targets import load_app, load_server

Target = Annotated[
    str,
    typer.Argument(
        help="the object that `trainable` returned, as MODULE:NAME, such as my_app:agent; or an MCP server: mcp:COMMAND, "
        "mcp:URL or mcp:FILE.json"
    ),
]
Scenarios = Annotated[
    Path | None,
    typer.Option(help="JSONL, JSON or CSV file  [default: a server's own, held out]"),
]
Candidates = Annotated[
    list[str],
    typer.Option(
        "--with", help="candidate: step:0, step:newest, openai/gpt-4.1 or openai/NAME?api_base=URL; repeatable"
    ),
]
TrainedOn = Annotated[Path | None, more_option(help="training scenarios; the report warns if one of them is compared")]


@with_options(CompareOptions, JudgeOptions, ModelOptions)
def compare_command(
    target: Target,
    candidates: Candidates,
    scenarios: Scenarios = None,
    trained_on: TrainedOn = None,
    *,
    options: dict[str, Any],
) -> None:
    """Run an app with several models and report the differences.

    Each candidate answers in place of the app's own model.

    \b
    Example:
      offbook compare my_app:agent --scenarios held_out.jsonl --with step:0 --with step:newest
    """
    chosen = options_of(CompareOptions, options) | judge_option(options)
    if trained_on is not None:
        chosen["trained_on"] = load_scenarios(trained_on)
    compared: Any = load_server(target, scenarios=scenarios, **options_of(ModelOptions, options))
    loaded = None
    if compared is None:
        if scenarios is None:
            raise ConfigError("--scenarios: a file is needed, such as --scenarios held_out.jsonl")
        compared, loaded = load_app(target), load_scenarios(scenarios)
        chosen |= model_option(options)
    result = compare(compared, loaded, candidates, **chosen)
    echo("\n".join(result_lines(result, chosen.get("output", CompareOptions.output))))
