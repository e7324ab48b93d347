"""The command `offbook improve`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.client.model import TrainableModel
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.option_values import judge_option, model_option, sinks_option, train_config
from offbook.commands.options import ImitationOptions, JudgeOptions, ModelOptions, Trace
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.options import TrainerOptions
from offbook_auto.app_source import AppWithScenarios, WrappedApp
from offbook_auto.estimate import plan_lines
from offbook_auto.improve import Improver, TrainingSource
from offbook_auto.options import ROUNDS_SET, ImproveOptions
from offbook_compare.loading import load_app, load_server

Target = Annotated[
    str,
    typer.Argument(
        help="the object that `trainable` returned, as MODULE:NAME, such as my_app:agent; or an MCP server: mcp:COMMAND, "
        "mcp:URL or mcp:FILE.json"
    ),
]
Scenarios = Annotated[
    Path | None,
    typer.Option(
        help="JSONL or CSV file, or FOLDER[:SPLIT] of a saved Hugging Face dataset  [default: a server's own, generated "
        "at first use]"
    ),
]
MaxCost = Annotated[float | None, typer.Option(help="limit for other LLMs in all runs with this --output, in USD")]
HeldOut = Annotated[Path | None, typer.Option("--eval", help="held-out scenarios  [default: a quarter of --scenarios]")]


@with_options(
    ImproveOptions,
    TrainerOptions,
    TrainConfig,
    ImitationOptions,
    JudgeOptions,
    ModelOptions,
    without=ROUNDS_SET,
    unlisted=("group_size", "scenarios_per_step", "learning_rate"),
)
def improve(
    target: Target,
    scenarios: Scenarios = None,
    held_out: HeldOut = None,
    max_cost: MaxCost = None,
    trace: Trace = None,
    until: Annotated[
        Literal["scenarios", "observe", "sft", "train", "compare"], typer.Option(help="last stage to run")
    ] = "compare",
    dry_run: Annotated[bool, typer.Option(help="show what each stage will take, and run nothing")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Replace an app's model with one that you train.

    The command observes the app on its own model, imitates the good runs, trains while held-out success rises, and
    compares both models. If Ctrl-C or a crash ends it, the same command continues.

    \b
    Example:
      offbook improve my_app:agent --scenarios tasks.jsonl
    """
    sft = ImitationOptions(**options_of(ImitationOptions, options)).config()
    path: dict[str, Any] = {"max_cost": max_cost, "sft": sft}
    chosen = ImproveOptions(**path, **options_of(ImproveOptions, options))
    training = options_of(TrainerOptions, options) | judge_option(options) | sinks_option(trace)
    learner, named = options_of(TrainConfig, options), options_of(ModelOptions, options)
    source: TrainingSource
    if (trainer := load_server(target, scenarios=scenarios, learner=learner, **named, **training)) is not None:
        if (teacher := chosen.teaching()) is not None and teacher.as_is:
            raise ConfigError("--teacher: a server has no model of its own: name an LLM, such as openai/gpt-4.1")
        servers: Any = importlib.import_module("offbook_auto.server_source")  # needs the extra `mcp`
        source = servers.ServerSource(trainer, cast(Any, trainer).existing())
    else:
        training |= {"config": train_config(options)}
        source = _app(target, scenarios, held_out, model_option(options).get("model"), training)
    improver = Improver(source, chosen)
    if dry_run:
        echo("\n".join(plan_lines(improver.plan(), chosen.max_cost)))
    else:
        improver.run(until)


def _app(
    target: str, scenarios: Path | None, held_out: Path | None, model: TrainableModel | None, training: dict[str, Any]
) -> AppWithScenarios:
    if scenarios is None:
        raise ConfigError("--scenarios: a file is needed, such as --scenarios tasks.jsonl")
    held = () if held_out is None else load_scenarios(held_out)
    app = load_app(target)
    return AppWithScenarios(cast(WrappedApp, app), load_scenarios(scenarios), held, model, training)
