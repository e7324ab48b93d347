"""The commands `offbook auto`, `offbook improve` and `offbook learn`."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.terminal import echo
from offbook.base.types import Json
from offbook.client.model import TrainableModel
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.help_pages import more_option
from offbook.commands.option_values import judge_option, model_option, sinks_option, train_config
from offbook.commands.options import ImitationOptions, JudgeOptions, ModelOptions, Target, Trace
from offbook.scenarios.identity import scenario_fields
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.options import TrainerOptions
from offbook.trainer.trainable_target import load_target
from offbook_compare.command import Target as ComparedTarget
from offbook_compare.targets import load_app, load_server

from .described import AutoTrainer
from .improve import Improver
from .learn import Learning, LearnOptions
from .options import BASE_MODEL, ROUNDS_SET, AutoOptions, ImproveOptions, name_of
from .sources import AppWithScenarios, TrainingSource, WrappedApp
from .task import read_task

Description = Annotated[
    str, typer.Argument(help="what the model is to do, in words; not needed if --output has a task.yaml")
]
Examples = Annotated[Path | None, typer.Option(help="JSONL or CSV file of examples: input, and output if known")]
Schema = Annotated[Path | None, more_option(help="file with a JSON schema; an answer that does not match it scores 0")]
Tools = Annotated[Path | None, more_option(help="file with function tools in OpenAI's format, as a JSON list")]
Base = Annotated[str, typer.Option(help="base of the model: tiny, tiny-mcp, a folder, or a Hugging Face name")]
Scenarios = Annotated[
    Path | None,
    typer.Option(help="JSONL, JSON or CSV file  [default: a server's own, generated at first use]"),
]
MaxCost = Annotated[float | None, typer.Option(help="limit for other LLMs in all runs with this --output, in USD")]
HeldOut = Annotated[Path | None, typer.Option("--eval", help="held-out scenarios  [default: a quarter of --scenarios]")]


@with_options(AutoOptions, TrainConfig, unlisted=["learning_rate"])
def auto(
    description: Description = "",
    base_model: Base = BASE_MODEL,
    model: Annotated[str | None, more_option(help="name of the model  [default: from the description]")] = None,
    examples: Examples = None,
    schema: Schema = None,
    tools: Tools = None,
    until: Annotated[
        Literal["task", "scenarios", "prompt", "rubric", "train", "compare"],
        typer.Option(help="last stage to run; you can edit its files before you continue"),
    ] = "compare",
    dry_run: Annotated[bool, typer.Option(help="show the planned requests and their price, and send nothing")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model from a description of its task alone.

    Another LLM writes inputs, a system prompt and a rubric. A judge scores the answers by the rubric. Each stage leaves a
    file in the output folder (task.yaml, scenarios.jsonl, prompt.md, rubric.md), which you may edit. An existing file is
    used as it is.

    \b
    Example:
      offbook auto 'Summarise a support e-mail in one sentence' --llm openai/gpt-4.1 --dry-run
    """
    chosen: dict[str, Any] = {**options_of(AutoOptions, options), "config": train_config(options)}
    if examples is not None:
        chosen["examples"] = [scenario_fields(one) for one in load_scenarios(examples)]
    if schema is not None:
        chosen["answer_schema"] = json_file(schema, "--schema", dict)
    if tools is not None:
        chosen["tools"] = json_file(tools, "--tools", list)
    task = (chosen.get("output") or Path()) / "task.yaml"
    name = model or name_of(description or (read_task(task).description if task.exists() else ""))
    trainer = AutoTrainer(description, model=TrainableModel(name, project="auto", base_model=base_model), **chosen)
    if dry_run:
        echo("\n".join(trainer.plan()))
    else:
        trainer.run(until)


def json_file(file: Path, where: str, kind: type) -> Json:
    """The JSON value of a file. Raises ConfigError for another kind of value."""
    try:
        value: Json = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: {file} holds a {type(value).__name__}; a {kind.__name__} is needed")
    return value


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
    target: ComparedTarget,
    scenarios: Scenarios = None,
    held_out: HeldOut = None,
    max_cost: MaxCost = None,
    trace: Trace = None,
    until: Annotated[
        Literal["scenarios", "observe", "sft", "train", "compare"], typer.Option(help="last stage to run")
    ] = "compare",
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
        if scenarios is None:
            raise ConfigError("--scenarios: a file is needed, such as --scenarios tasks.jsonl")
        held, app = () if held_out is None else load_scenarios(held_out), cast(WrappedApp, load_app(target))
        source = AppWithScenarios(app, load_scenarios(scenarios), held, model_option(options).get("model"), training)
    Improver(source, chosen).run(until)


@with_options(LearnOptions, ImitationOptions, ModelOptions)
def learn(
    target: Target,
    *,
    options: dict[str, Any],
) -> None:
    """Continue training on an app's newest traffic, and promote a step only if it does better.

    A fork of the model imitates the recorded threads with good rewards. The app then answers held-out questions with the old and the new step. If Ctrl-C or a crash ends a round, the same
    command continues it.

    \b
    Example:
      offbook learn my_app:agent --route order-desk --min-reward 1
    """
    app = load_target(target)
    if not isinstance(app, WrappedApp):
        raise ConfigError(f"target: what offbook_langgraph.trainable(...) returned is needed, got {app!r:.200}")
    models = app.own_models()
    trained = model_option(options).get("model") or (models[0] if len(models) == 1 else None)
    if trained is None:
        raise ConfigError(
            "target: exactly one model can be trained: pass trainable(model=...), or --model and --base-model"
        )
    sft = ImitationOptions(**options_of(ImitationOptions, options)).config()
    learning = Learning(app, trained, LearnOptions(**options_of(LearnOptions, options), sft=sft))
    with learning.held():
        asyncio.run(learning.once())
