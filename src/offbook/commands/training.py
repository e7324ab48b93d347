"""The commands `offbook train`, `offbook eval` and `offbook sft`."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.client.model import TrainableModel
from offbook.client.supervised_training import SFTResult
from offbook.processes.command import Command, CommandOptions
from offbook.processes.environment import passed_variables
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.evaluate import RegressionGate, interval_lines, printing_failures, report_json
from offbook.trainer.messages import failure_lines
from offbook.trainer.options import EvaluateOptions, TrainOptions
from offbook.trainer.trainable_target import TrainableTarget, load_target

from .generated_options import options_of, with_options
from .help_pages import more_option
from .option_values import judge_option, model_option, sinks_option, train_config
from .options import Env, JudgeOptions, ModelOptions, Results, Scenarios, Trace

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
    str | None, more_option("--in", help="prefix that runs the program in a sandbox, such as 'docker run ...'")
]
Runner = Annotated[
    str | None,
    typer.Option(help="run the rollouts elsewhere: the name of a plug-in, such as ray"),
]
SuccessAt = Annotated[float | None, more_option(help="lowest reward that counts as a success")]
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


@with_options(TrainOptions, TrainConfig, JudgeOptions, ModelOptions, CommandOptions, unlisted=["scenarios_per_step"])
def train(
    scenarios: Scenarios,
    target: TargetOrCommand = None,
    command: CommandLine = None,
    inside: Inside = None,
    env: Env = [],  # noqa: B006
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on before and after training")] = None,
    trace: Trace = None,
    runner: Runner = None,
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
    chosen = options_of(TrainOptions, options) | {"config": train_config(options)} | sinks_option(trace)
    chosen |= judge_option(options) | model_option(options)
    loaded = load_scenarios(scenarios)
    if runner is not None:
        chosen["runner"] = runner
    if eval is not None:
        chosen["eval"] = load_scenarios(eval)
    trainable().train(loaded, **chosen)


@with_options(EvaluateOptions, JudgeOptions, ModelOptions, CommandOptions, without=NOT_TRAINING)
def evaluate(
    scenarios: Scenarios,
    target: TargetOrCommand = None,
    command: CommandLine = None,
    inside: Inside = None,
    env: Env = [],  # noqa: B006
    success_at: SuccessAt = None,
    fail_below: FailBelow = None,
    fail_if_worse_than: FailIfWorse = None,
    results: Results = None,
    trace: Trace = None,
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
    chosen = options_of(EvaluateOptions, options) | sinks_option(trace)
    chosen |= judge_option(options) | model_option(options)
    if results is not None and (results.is_dir() or not results.absolute().parent.is_dir()):
        raise ConfigError(f"--results: {results} cannot be written: name a file in an existing folder")
    loaded = load_scenarios(scenarios)
    gate = RegressionGate(fail_below, fail_if_worse_than, success_at)
    with printing_failures():
        evaluation = trainable().evaluate(loaded, **chosen)
    if results is not None:
        results.write_text(report_json(evaluation), encoding="utf-8")
    comparison, faults = gate.examine(evaluation)
    measured = [str(evaluation), *interval_lines(evaluation, success_at), *comparison]
    echo("\n".join([*measured, *failure_lines(evaluation.failures)]))
    if faults:
        echo("\n".join(faults), err=True)
        raise typer.Exit(1)


def target_or_command(
    target: str | None, command: str | None, inside: str | None, env: list[str], options: dict[str, Any]
) -> Callable[[], TrainableTarget]:
    """What loads the app, or makes the Command of `--command`; its options are taken out of `options`. Raises ConfigError."""
    own = options_of(CommandOptions, options)
    own |= {} if inside is None else {"inside": inside}
    own |= {"env": passed_variables(env, os.environ)} if env else {}
    if command is None and target is None:
        raise ConfigError("nothing to run: name MODULE:NAME, or a program with --command 'node agent.js {prompt}'")
    if command is None:
        if own:
            flags = ["--in" if name == "inside" else f"--{name.replace('_', '-')}" for name in own]
            raise ConfigError(f"{', '.join(flags)}: only valid with --command")
        return lambda: load_target(str(target))
    if target is not None:
        raise ConfigError(f"target: {target} and --command are two things to run: leave one of them out")
    program = cast(TrainableTarget, Command(command, **own))  # it names its options, which the protocol leaves open
    return lambda: program


@with_options(SFTConfig)
def sft(
    data: Annotated[
        Path, typer.Argument(help="JSONL or JSON file of conversations, in the format of OpenAI's fine-tuning")
    ],
    base_model: Annotated[
        str, typer.Option("--base-model", "--base", help="base: tiny, tiny-mcp, a folder, or a Hugging Face name")
    ],
    model: Annotated[str | None, typer.Option(help="name of the trained model  [default: the file's name]")] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model on conversations: it learns to answer as their assistant.

    Each batch is a step. If Ctrl-C or a crash ends the command, the same command continues.

    \b
    Example:
      offbook sft conversations.jsonl --base-model Qwen/Qwen2.5-1.5B-Instruct
    """
    config = SFTConfig.parse(**options)
    name = model or re.sub(r"[^A-Za-z0-9._-]+", "-", data.stem).strip("-._")
    trained = TrainableModel(name or "sft", base_model=base_model)
    try:
        result = asyncio.run(trained.train_sft(data, config))
    except KeyboardInterrupt:
        echo("offbook: the batches so far are steps of the model; the same command continues from there", err=True)
        raise
    echo("\n".join(result_lines(result)))


def result_lines(result: SFTResult) -> list[str]:
    """What a training did, for a person."""
    lines = [
        f"{result.model}, step {result.step}: {len(result.updates):,} batches of {counted(result.examples, 'example')}"
        + f" ({result.resumed:,} of them by an earlier run)" * bool(result.resumed)
    ]
    if result.updates:
        first, last = result.updates[0], result.updates[-1]
        lines.append(f"loss      {first.loss:.3f} -> {last.loss:.3f} nats per token")
    if result.held_out:
        curve = " -> ".join(f"{point.loss:.3f}" for point in result.held_out[-6:])
        best = f", the lowest at step {result.best_step}" if result.best_step != result.step else ""
        stopped = ", which no longer fell" if result.stopped == "no_improvement" else ""
        lines.append(f"held out  {curve} nats per token{best}{stopped}")
    if result.skipped:
        lines.append(f"left out  {result.skipped:,} rows or messages that cannot be trained")
    if result.redacted:
        lines.append(f"masked    secrets in {counted(result.redacted, 'text')}")
    return lines
