"""The commands `offbook train` and `offbook eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from offbook.base.config import LossName, TrainConfig
from offbook.base.errors import ConfigError
from offbook.client.model import TrainableModel
from offbook.scenarios.loading import load_scenarios
from offbook.tracing.jsonl import JsonlSink
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.evaluate import RegressionGate, interval_lines, printing_failures, report_json
from offbook.trainer.judge_check import ruler_at
from offbook.trainer.messages import evaluation_line, failure_lines
from offbook.trainer.options import TrainerOptions as Run
from offbook.trainer.trainable_target import load_target

from .options import (
    MAX_COMPLETION_HELP,
    BaseModel,
    Concurrency,
    JudgeBase,
    JudgeModel,
    MaxCost,
    ModelName,
    Patience,
    Results,
    Retries,
    RubricFile,
    RunName,
    Scenarios,
    SuccessAt,
    Target,
    TargetReward,
    Temperature,
    Timeout,
    Trace,
)

MaxCompletion = Annotated[int | None, typer.Option(min=1, help=MAX_COMPLETION_HELP)]


def train(
    target: Target,
    scenarios: Scenarios,
    steps: Annotated[int, typer.Option(min=1, help="total number of steps; another run resumes")] = 50,
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on before and after training")] = None,
    eval_every: Annotated[int, typer.Option(min=0, help="steps between evaluations; 0: none")] = Run.eval_every,
    group_size: Annotated[int, typer.Option(min=2, help="rollouts per scenario")] = Run.group_size,
    scenarios_per_step: Annotated[int, typer.Option(min=1, help="scenarios per step")] = Run.scenarios_per_step,
    concurrency: Concurrency = Run.concurrency,
    timeout: Timeout = Run.timeout,
    retries: Retries = Run.retries,
    max_completion_tokens: MaxCompletion = None,
    patience: Patience = Run.patience,
    target_reward: TargetReward = Run.target_reward,
    learning_rate: Annotated[float, typer.Option(help="learning rate of AdamW")] = TrainConfig().learning_rate,
    loss: Annotated[str, typer.Option(help=f"loss function: {', '.join(get_args(LossName))}")] = TrainConfig().loss,
    overlap: Annotated[bool, typer.Option(help="run the next step's rollouts during an update")] = False,
    max_cost: MaxCost = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the order of scenarios")] = 0,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    log: Annotated[Path | None, typer.Option(help="folder to write rollouts and steps to, as JSONL")] = None,
    trace: Trace = None,
    run: RunName = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Train a wrapped function or graph on scenarios."""
    options: dict[str, Any] = {
        "eval_every": eval_every,
        "group_size": group_size,
        "scenarios_per_step": scenarios_per_step,
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        "patience": patience,
        "target_reward": target_reward,
        "config": TrainConfig.parse(learning_rate=learning_rate, loss=loss, overlap=overlap, seed=seed),
        "seed": seed,
        **judge_option(judge, judge_api_base, rubric),
        **chosen_options(run=run, max_cost=max_cost, max_completion_tokens=max_completion_tokens),
        **model_option(model, base_model),
    }
    loaded = load_scenarios(scenarios)
    if eval is not None:
        options["eval"] = load_scenarios(eval)
    trainable = load_target(target)
    trainable.train(loaded, steps=steps, **(options | sinks_option(log, trace)))


def evaluate(
    target: Target,
    scenarios: Scenarios,
    temperature: Temperature = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    concurrency: Concurrency = Run.concurrency,
    timeout: Timeout = Run.timeout,
    retries: Retries = Run.retries,
    max_completion_tokens: MaxCompletion = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    success_at: SuccessAt = None,
    fail_below: Annotated[float | None, typer.Option(help="exit code 1 below this success rate, or reward")] = None,
    fail_if_worse_than: Annotated[
        Path | None,
        typer.Option(help="exit code 1 if worse, with 95 % confidence, than this file of an earlier --json"),
    ] = None,
    json: Results = None,
    trace: Trace = None,
    run: RunName = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Evaluate the newest step on scenarios.

    Prints confidence intervals. The exit code can gate continuous integration."""
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        **judge_option(judge, judge_api_base, rubric),
        **chosen_options(run=run, max_completion_tokens=max_completion_tokens),
        **model_option(model, base_model),
        **sinks_option(None, trace),
    }
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise ConfigError(f"--json: {json} cannot be written: name a file in an existing folder")
    loaded = load_scenarios(scenarios)
    gate = RegressionGate(fail_below, fail_if_worse_than, success_at)
    with printing_failures():
        evaluation = load_target(target).evaluate(loaded, temperature=temperature, rollouts=rollouts, **options)
    if json is not None:
        json.write_text(report_json(evaluation), encoding="utf-8")
    comparison, faults = gate.examine(evaluation)
    measured = [evaluation_line(evaluation), *interval_lines(evaluation, success_at), *comparison]
    typer.echo("\n".join([*measured, *failure_lines(evaluation.failures)]))
    if faults:
        typer.echo("\n".join(faults), err=True)
        raise typer.Exit(1)


def chosen_options(
    run: str | None = None, max_cost: float | None = None, max_completion_tokens: int | None = None
) -> dict[str, Any]:
    """The options that have a value; for the others, the target's own hold."""
    options = {"run": run, "max_cost": max_cost, "max_completion_tokens": max_completion_tokens}
    return {name: value for name, value in options.items() if value is not None}


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
