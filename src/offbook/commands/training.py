"""The commands `offbook train` and `offbook eval`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from offbook.base.config import RewardLossName, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.client.model import TrainableModel
from offbook.processes.command import Command, CommandOptions
from offbook.processes.environment import passed_variables
from offbook.scenarios.loading import load_scenarios
from offbook.tracing.jsonl import JsonlSink
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.evaluate import RegressionGate, interval_lines, printing_failures, report_json
from offbook.trainer.judge_check import ruler_at
from offbook.trainer.messages import evaluation_line, failure_lines
from offbook.trainer.options import EvaluateOptions, TrainOptions
from offbook.trainer.trainable_target import TrainableTarget, load_target

from .generated_options import with_options
from .options import (
    BaseModel,
    Env,
    JudgeBase,
    JudgeModel,
    MinReward,
    ModelName,
    Results,
    RubricFile,
    Scenarios,
    SuccessAt,
    Trace,
)

TargetOrCommand = Annotated[
    str | None,
    typer.Argument(
        help="the object that `trainable` returned, as MODULE:NAME, such as my_app:agent; or pass --command",
        show_default=False,
    ),
]
CommandLine = Annotated[
    str | None,
    typer.Option("--command", help="program to run for each rollout, such as 'node agent.js {prompt}'; needs --model"),
]
Inside = Annotated[
    str | None, typer.Option("--in", help="prefix that runs the program in a sandbox, such as 'docker run ...'")
]
Runner = Annotated[
    str | None,
    typer.Option(help="run the rollouts elsewhere: ray, for the Ray cluster of RAY_ADDRESS or of this machine"),
]

FailBelow = Annotated[
    float | None,
    typer.Option(
        help="exit with code 1 if the success rate is below this; without a success rate, the mean reward counts"
    ),
]
FailIfWorse = Annotated[
    Path | None,
    typer.Option(
        help="exit with code 1 if this evaluation is worse, with 95 % confidence, than an earlier one that --results wrote here"
    ),
]

NOT_TRAINING = ("eval_every", "group_size", "scenarios_per_step", "replayed", "patience", "target_reward", "seed")
"""Options of a Trainer that an evaluation does not read."""


@with_options(TrainOptions, CommandOptions)
def train(
    scenarios: Scenarios,
    target: TargetOrCommand = None,
    command: CommandLine = None,
    inside: Inside = None,
    env: Env = [],  # noqa: B006
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on before and after training")] = None,
    learning_rate: Annotated[float, typer.Option(help="learning rate of AdamW")] = TrainConfig().learning_rate,
    loss: Annotated[
        str, typer.Option(help=f"loss function: {', '.join(get_args(RewardLossName))}")
    ] = TrainConfig().loss,
    min_reward: MinReward = None,
    minibatches: Annotated[int, typer.Option(help="updates of each step")] = TrainConfig().minibatches,
    overlap: Annotated[bool, typer.Option(help="run the next step's rollouts during an update")] = False,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    log: Annotated[Path | None, typer.Option(help="folder for the rollouts and steps, as JSONL")] = None,
    trace: Trace = None,
    runner: Runner = None,
    model: ModelName = None,
    base_model: BaseModel = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a wrapped function or graph, or any program, on scenarios.

    \b
    Examples:
      offbook train my_app:agent --scenarios tasks.jsonl --eval held_out.jsonl --steps 30
      offbook train --command 'node agent.js {prompt}' --scenarios tasks.jsonl --model agent --base-model tiny
    """
    trainable = target_or_command(target, command, inside, env, options)
    chosen = {"learning_rate": learning_rate, "loss": loss if min_reward is None else "cross_entropy"}
    chosen |= {"min_reward": min_reward, "minibatches": minibatches, "overlap": overlap, "seed": options["seed"]}
    config = TrainConfig.parse(**chosen)
    options |= {"config": config, **judge_option(judge, judge_api_base, rubric), **model_option(model, base_model)}
    if runner is not None:
        options["runner"] = runner
    loaded = load_scenarios(scenarios)
    if eval is not None:
        options["eval"] = load_scenarios(eval)
    trainable().train(loaded, **(options | sinks_option(log, trace)))


@with_options(EvaluateOptions, CommandOptions, without=NOT_TRAINING)
def evaluate(
    scenarios: Scenarios,
    target: TargetOrCommand = None,
    command: CommandLine = None,
    inside: Inside = None,
    env: Env = [],  # noqa: B006
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    success_at: SuccessAt = None,
    fail_below: FailBelow = None,
    fail_if_worse_than: FailIfWorse = None,
    results: Results = None,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
    *,
    options: dict[str, Any],
) -> None:
    """Evaluate the newest step on scenarios.

    Prints confidence intervals. The exit code can gate continuous integration.

    \b
    Example:
      offbook eval my_app:agent --scenarios held_out.jsonl --fail-below 0.8
    """
    trainable = target_or_command(target, command, inside, env, options)
    options |= judge_option(judge, judge_api_base, rubric) | model_option(model, base_model) | sinks_option(None, trace)
    if results is not None and (results.is_dir() or not results.absolute().parent.is_dir()):
        raise ConfigError(f"--results: {results} cannot be written: name a file in an existing folder")
    loaded = load_scenarios(scenarios)
    gate = RegressionGate(fail_below, fail_if_worse_than, success_at)
    with printing_failures():
        evaluation = trainable().evaluate(loaded, **options)
    if results is not None:
        results.write_text(report_json(evaluation), encoding="utf-8")
    comparison, faults = gate.examine(evaluation)
    measured = [evaluation_line(evaluation), *interval_lines(evaluation, success_at), *comparison]
    echo("\n".join([*measured, *failure_lines(evaluation.failures)]))
    if faults:
        echo("\n".join(faults), err=True)
        raise typer.Exit(1)


def target_or_command(
    target: str | None, command: str | None, inside: str | None, env: list[str], options: dict[str, Any]
) -> Callable[[], TrainableTarget]:
    """What loads the app, or makes the Command of `--command`; its options are taken out of `options`. Raises ConfigError."""
    own = {item.name: options.pop(item.name) for item in fields(CommandOptions) if item.name in options}
    own |= {} if inside is None else {"inside": inside}
    own |= {"env": passed_variables(env, os.environ)} if env else {}
    if command is None and target is None:
        raise ConfigError("nothing to run: name MODULE:NAME, or a program with --command 'node agent.js {prompt}'")
    if command is None:
        if changed := [name for name, value in own.items() if value != getattr(CommandOptions(), name, None)]:
            named = ", ".join(f"--{'in' if name == 'inside' else name}" for name in changed)
            raise ConfigError(f"{named}: only valid with --command")
        return lambda: load_target(str(target))
    if target is not None:
        raise ConfigError(f"target: {target} and --command are two things to run: leave one of them out")
    program = cast(TrainableTarget, Command(command, **own))  # it names its options, which the protocol leaves open
    return lambda: program


def judge_option(model: str | None, api_base: str | None, rubric: Path | None) -> dict[str, Any]:
    """The option `judge=`, empty without `--judge`. Raises ConfigError for the judge's other options without it."""
    if model is None and (api_base, rubric) != (None, None):
        raise ConfigError("--judge-api-base and --rubric need --judge too, as in --judge openai/o3")
    return {} if model is None else {"judge": ruler_at(model, api_base, rubric)}


def model_option(name: str | None, base_model: str | None) -> dict[str, Any]:
    """The option `model=`, empty without `--model` and `--base-model`. Raises ConfigError for one without the other."""
    if name is None and base_model is None:
        return {}
    if name is None or base_model is None:
        option, missing = ("--base-model", "--model") if name is None else ("--model", "--base-model")
        raise ConfigError(
            f"{option} needs {missing} too, as in --model email-agent --base-model Qwen/Qwen2.5-7B-Instruct"
        )
    return {"model": TrainableModel(name, base_model=base_model)}


def sinks_option(log: Path | None, trace: str | None) -> dict[str, Any]:
    """The option `sinks=`, empty without `--log` and `--trace`. Raises ConfigError for an unknown sink."""
    sinks = [
        *([log_folder(log)] if log is not None else []),
        *(named_sinks(trace, "--trace") if trace is not None else []),
    ]
    return {"sinks": resolve_sinks(sinks)} if sinks else {}


def log_folder(folder: Path) -> JsonlSink:
    """The sink that writes JSONL to this folder. Raises ConfigError if the folder cannot be created."""
    try:
        return JsonlSink(folder)
    except OSError as error:
        raise ConfigError(f"--log: the folder {folder} cannot be created: {error.strerror or error}") from error
