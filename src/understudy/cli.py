"""The command `understudy`: argv -> options -> one call. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from . import plugins
from .client.commands import convert_command, export_model, list_checkpoints, run_server
from .client.model import TrainableModel
from .comparison.commands import compare_command
from .config import MAX_TEMPERATURE, EngineOptions, LossName, TrainConfig
from .doctor.command import doctor_command
from .errors import ConfigError, MissingExtraError, UnderstudyError
from .scenarios.loading import load_scenarios
from .trace_commands import Dir, Server, traces, usage
from .tracing.commands import named_sinks
from .tracing.jsonl import JsonlSink
from .tracing.names import resolve_sinks
from .trainer.evaluation_report import RegressionGate, interval_lines, report_json
from .trainer.judge_check import check_judge_on, read_ranked, ruler_at
from .trainer.messages import evaluation_line, failure_lines
from .trainer.options import RunOptions
from .trainer.target import TargetOptions, load_target

INTERRUPTED = 130
COMMANDS: Final = "understudy.commands"
ALL_TO_THE_COMMAND: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""typer's settings of a command that reads its own line."""
app = typer.Typer(
    name="understudy",
    help="Train a small open model to play the LLM's part in the agent you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(traces, name="traces")
app.command()(usage)
app.command("compare")(compare_command)
app.command("doctor")(doctor_command)

Target = Annotated[str, typer.Argument(help="what `trainable` returned, as module:name, such as my_app:agent")]
Scenarios = Annotated[Path, typer.Option(help="JSONL or CSV file, or folder[:split] of a saved Hugging Face dataset")]
Concurrency = Annotated[int, typer.Option(min=1, help="rollouts at once")]
Timeout = Annotated[float, typer.Option(help="seconds per rollout")]
Retries = Annotated[int, typer.Option(min=0, help="how often a rollout that fails is run again")]
MaxCompletion = Annotated[
    int | None, typer.Option(min=1, help="tokens of one completion, where the app sets no smaller limit")
]
MaxCost = Annotated[float | None, typer.Option(help="USD for other LLMs, such as a judge; then the run ends")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="name of the model, where the target was wrapped without")
]
BaseModel = Annotated[str | None, typer.Option(help="its base: a Hugging Face name, a folder, or tiny")]
Patience = Annotated[int, typer.Option(min=1, help="iterations in a row without anything to train on that end the run")]
TargetReward = Annotated[float, typer.Option(help="mean reward at which such an end is a success")]
JudgeModel = Annotated[str | None, typer.Option("--judge", help="LLM that scores rollouts by RULER, such as openai/o3")]
JudgeBase = Annotated[str | None, typer.Option(help="URL of the judge's endpoint; none: the provider's own")]
RubricFile = Annotated[Path | None, typer.Option(help="file with the judge's rubric; none: the default")]
Trace = Annotated[str | None, typer.Option(help="where to show rollouts and steps, such as langfuse,wandb")]


@app.command(context_settings=ALL_TO_THE_COMMAND)
def serve(context: typer.Context) -> None:
    """Serve a model with OpenAI's API, record its calls, train it (`understudy serve --help` lists the options)."""
    run_server(context.args)


@app.command(context_settings=ALL_TO_THE_COMMAND)
def ui(context: typer.Context) -> None:
    """Show the runs of a directory in a browser, also where no server runs (`understudy ui [DIR] [--port N]`)."""
    run_server(["ui", *context.args])


@app.command(context_settings=ALL_TO_THE_COMMAND)
def runs(context: typer.Context) -> None:
    """List the runs of a directory, also where no server runs (`understudy runs [DIR]`)."""
    run_server(["runs", *context.args])


@app.command("show", context_settings=ALL_TO_THE_COMMAND)
def show_records(context: typer.Context) -> None:
    """Show a run's steps, or a rollout's conversation (`understudy show RUN|TRAJECTORY [--dir DIR]`)."""
    run_server(["show", *context.args])


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="seed of the training requests and their order")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="steps in all; none: as many as it takes")] = None,
    json: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    dir: Annotated[Path, typer.Option(help="folder for everything it makes")] = Path("understudy-quickstart"),
    engine: Annotated[str, typer.Option(help="what samples: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, typer.Option(help="who loads the base for training: auto, peft or unsloth")] = "auto",
) -> None:
    """Train a LangGraph agent over a real database on this machine, and watch it get better."""
    engines = EngineOptions.parse(engine=engine, loader=loader)
    part("understudy.quickstart.run", "langchain", "quickstart").main(seed, steps, dir, json, engines)


@app.command()
def train(
    target: Target,
    scenarios: Scenarios,
    steps: Annotated[int, typer.Option(min=1, help="steps in all; run again, it goes on")] = 50,
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on, before and after")] = None,
    eval_every: Annotated[int, typer.Option(min=0, help="and after so many steps; 0: never")] = RunOptions.eval_every,
    group_size: Annotated[int, typer.Option(min=2, help="rollouts per scenario")] = RunOptions.group_size,
    scenarios_per_step: Annotated[int, typer.Option(min=1, help="scenarios per step")] = RunOptions.scenarios_per_step,
    concurrency: Concurrency = RunOptions.concurrency,
    timeout: Timeout = RunOptions.timeout,
    retries: Retries = RunOptions.retries,
    max_completion_tokens: MaxCompletion = None,
    patience: Patience = RunOptions.patience,
    target_reward: TargetReward = RunOptions.target_reward,
    learning_rate: Annotated[float, typer.Option(help="AdamW's rate")] = TrainConfig().learning_rate,
    loss: Annotated[str, typer.Option(help=", ".join(get_args(LossName)))] = TrainConfig().loss,
    overlap: Annotated[bool, typer.Option(help="go on with the next step's rollouts during an update")] = False,
    max_cost: MaxCost = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the scenarios' order")] = 0,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    log: Annotated[Path | None, typer.Option(help="folder for rollouts and steps as JSONL")] = None,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Train a wrapped function or graph on scenarios."""
    options: TargetOptions = {
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
        **length_option(max_completion_tokens),
        **cost_option(max_cost),
        **model_option(model, base_model),
    }
    loaded = load_scenarios(scenarios)
    if eval is not None:
        options["eval"] = load_scenarios(eval)
    found = load_target(target)
    options |= sinks_option(log, trace)
    found.train(loaded, steps=steps, **options)


@app.command("eval")
def evaluate(
    target: Target,
    scenarios: Scenarios,
    temperature: Annotated[float, typer.Option(min=0, max=MAX_TEMPERATURE, help="0 is greedy")] = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    concurrency: Concurrency = RunOptions.concurrency,
    timeout: Timeout = RunOptions.timeout,
    retries: Retries = RunOptions.retries,
    max_completion_tokens: MaxCompletion = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    success_at: Annotated[float | None, typer.Option(help="a rollout succeeds from this reward on")] = None,
    fail_below: Annotated[
        float | None, typer.Option(help="exit code 1 where the mean success or reward is below")
    ] = None,
    fail_if_worse_than: Annotated[
        Path | None, typer.Option(help="exit code 1 where it is worse, with 95 % confidence, than this file of --json")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Score the newest step on scenarios, with intervals; exit codes for continuous integration."""
    options: TargetOptions = {
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        **judge_option(judge, judge_api_base, rubric),
        **length_option(max_completion_tokens),
        **model_option(model, base_model),
        **sinks_option(None, trace),
    }
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise ConfigError(f"--json: {json} cannot be written: a file in a folder that exists is needed")
    loaded = load_scenarios(scenarios)
    gate = RegressionGate(fail_below, fail_if_worse_than, success_at)
    found = load_target(target).evaluate(loaded, temperature=temperature, rollouts=rollouts, **options)
    if json is not None:
        json.write_text(report_json(found), encoding="utf-8")
    comparison, faults = gate.examine(found)
    shown = [evaluation_line(found), *interval_lines(found, success_at), *comparison, *failure_lines(found.failures)]
    typer.echo("\n".join(shown))
    for fault in faults:
        typer.echo(fault, err=True)
    if faults:
        raise typer.Exit(1)


@app.command("judge-check")
def judge_check(
    file: Annotated[Path, typer.Argument(help="JSONL of rollouts that you ranked: group, messages, and score or rank")],
    judge: Annotated[str, typer.Option(help="LLM to check, such as openai/o3")],
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    reasoning: Annotated[bool, typer.Option("--reasoning", help="let it compare before it scores")] = False,
    json: Annotated[Path | None, typer.Option(help="file for the results")] = None,
) -> None:
    """Compare a judge's order of rollouts with yours, before it decides what is trained."""
    ranked = read_ranked(file)
    check = asyncio.run(check_judge_on(ranked, ruler_at(judge, judge_api_base, rubric, reasoning=reasoning)))
    typer.echo("\n".join(check.lines()))
    if json is not None:
        results = asdict(check) | {"tau": check.tau, "accuracy": check.accuracy}
        json.write_text(dumps(results, indent=1) + "\n", encoding="utf-8")
    if not check.groups:
        raise typer.Exit(1)


@app.command()
def checkpoints(model: str, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    found = list_checkpoints(model, url, dir)
    for checkpoint in found:
        typer.echo(f"{checkpoint.step:5}  {checkpoint.path}")
    if not found:
        typer.echo(f"model {model!r} is at step 0: nothing has been trained yet, so it has no checkpoints", err=True)


@app.command()
def export(
    model: str,
    output: Annotated[Path, typer.Option(help="new folder, on this machine")],
    format: Annotated[
        str, typer.Option(help="peft: the LoRA; merged: base and LoRA as one model; gguf-ready: that for llama.cpp")
    ] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="none: the newest")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that vLLM, transformers or llama.cpp's converter load; with --url it is downloaded."""
    written = export_model(model, output, format, step, url, dir)
    typer.echo(written)
    if format == "gguf-ready":
        typer.echo(f"one GGUF file of it: {convert_command(written)}", err=True)


@app.command()
def verify(
    dir: Path,
    repair: Annotated[bool, typer.Option("--repair", help="put damaged parts aside, mend model.json")] = False,
) -> None:
    """Check records, models and checkpoints of a directory on which no server runs; exit code 1 where one is damaged."""
    run_server(["verify", str(dir.expanduser().absolute()), *(["--repair"] if repair else [])])


@app.command()
def backup(dir: Path, output: Annotated[Path, typer.Argument(help="new folder")]) -> None:
    """Copy records, models and checkpoints of a directory, also while its server runs."""
    run_server(["backup", str(dir.expanduser().absolute()), str(output.expanduser().absolute())])


def length_option(max_completion_tokens: int | None) -> TargetOptions:
    """The option `max_completion_tokens=`; without it, the target's own holds."""
    return {} if max_completion_tokens is None else {"max_completion_tokens": max_completion_tokens}


def judge_option(model: str | None, api_base: str | None, rubric: Path | None) -> TargetOptions:
    """The option `judge=`, where `--judge` is given."""
    if model is None and (api_base, rubric) != (None, None):
        raise ConfigError("--judge-api-base and --rubric need --judge too, as in --judge openai/o3")
    return {} if model is None else {"judge": ruler_at(model, api_base, rubric)}


def cost_option(max_cost: float | None) -> TargetOptions:
    """The option `max_cost=`, where it is given."""
    return {} if max_cost is None else {"max_cost": max_cost}


def model_option(name: str | None, base_model: str | None) -> TargetOptions:
    """The option `model=`, where `--model` and `--base-model` are given."""
    if name is None and base_model is None:
        return {}
    if name is None or base_model is None:
        given, missing = ("--base-model", "--model") if name is None else ("--model", "--base-model")
        raise ConfigError(
            f"{given} needs {missing} too, as in --model email-agent --base-model Qwen/Qwen2.5-7B-Instruct"
        )
    return {"model": TrainableModel(name, base_model=base_model)}


def sinks_option(log: Path | None, trace: str | None) -> TargetOptions:
    """The option `sinks=`, where `--log` or `--trace` is given. Raises ConfigError for an unknown name."""
    sinks = [
        *([log_folder(log)] if log is not None else []),
        *(named_sinks(trace, "--trace") if trace is not None else []),
    ]
    return {"sinks": resolve_sinks(sinks)} if sinks else {}


def log_folder(folder: Path) -> JsonlSink:
    """The sink that writes there. Raises ConfigError."""
    try:
        return JsonlSink(folder)
    except OSError as error:
        raise ConfigError(f"--log: no folder can be made at {folder}: {error.strerror or error}") from error


def part(module: str, package: str, extra: str) -> Any:
    """A module that needs optional packages, loaded when its command runs. Raises MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "understudy":
            raise
        raise MissingExtraError(error.name or package, extra) from error


def add_plugged_commands() -> None:
    """Add the commands of integrations: each an entry point to a `typer.Typer`, loaded when it is used."""
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name in plugins.names(COMMANDS):
        if name not in own:
            text = f"Commands of an integration (`understudy {name} --help` lists them)."
            app.command(name, context_settings=ALL_TO_THE_COMMAND, help=text)(run_plugged)


def run_plugged(context: typer.Context) -> None:
    """Hand the rest of the line to an integration's command."""
    name = context.info_name or ""
    plugged = plugins.load(COMMANDS, name)
    if not isinstance(plugged, typer.Typer):
        raise ConfigError(f"plugin {name!r} in {COMMANDS!r} is of type {type(plugged).__name__}, and no typer.Typer")
    plugged(context.args, prog_name=f"understudy {name}")


def main() -> None:
    """The console script."""
    add_plugged_commands()
    sys.exit(guarded(app))


def guarded(command: Callable[[], None]) -> int:
    """Run a command; our errors become one sentence on stderr and an exit code."""
    try:
        command()
    except ConfigError as error:
        typer.echo(f"understudy: {error}", err=True)
        return 2
    except UnderstudyError as error:
        typer.echo(f"understudy: {error}", err=True)
        return 1
    except SystemExit as end:  # typer's, also for Ctrl-C, of which it says nothing
        if end.code == INTERRUPTED:
            typer.echo("understudy: interrupted", err=True)
        raise
    return 0
