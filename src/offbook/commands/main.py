"""The command `offbook`: parse the arguments and call the function behind the command.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Final, cast, get_args

import typer

from offbook import plugins
from offbook.base.config import EngineOptions, LossName, TrainConfig
from offbook.base.errors import ConfigError, MissingExtraError, OffbookError
from offbook.client.commands import (
    convert_command,
    export_model,
    list_checkpoints,
    run_server,
    server_folder,
)
from offbook.client.model import TrainableModel
from offbook.scenarios.loading import load_scenarios
from offbook.tracing.jsonl import JsonlSink
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.evaluate import RegressionGate, interval_lines, printing_failures, report_json
from offbook.trainer.judge_check import check_judge_on, read_ranked, ruler_at
from offbook.trainer.messages import evaluation_line, failure_lines
from offbook.trainer.options import RunOptions
from offbook.trainer.trainable_target import TargetOptions, load_target

from .compare import compare_command
from .doctor import doctor_command
from .options import (
    MAX_COMPLETION_HELP,
    BaseModel,
    Concurrency,
    Dir,
    JudgeBase,
    JudgeModel,
    MaxCost,
    Model,
    ModelName,
    Patience,
    Results,
    Retries,
    RubricFile,
    RunName,
    Scenarios,
    Server,
    SuccessAt,
    Target,
    TargetReward,
    Temperature,
    Timeout,
    Trace,
)
from .traces import traces, usage

INTERRUPTED = 130
COMMANDS: Final = "offbook.commands"
ALL_TO_THE_COMMAND: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""typer's settings for a command that parses its arguments itself."""
app = typer.Typer(
    name="offbook",
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

MaxCompletion = Annotated[int | None, typer.Option(min=1, help=MAX_COMPLETION_HELP)]


@app.command(context_settings=ALL_TO_THE_COMMAND)
def serve(context: typer.Context) -> None:
    """Serve a model with OpenAI's API, record its calls, train it."""
    run_server(context.args)


@app.command(context_settings=ALL_TO_THE_COMMAND)
def ui(context: typer.Context) -> None:
    """Show recorded runs in a browser, without a running server."""
    run_server(["ui", *context.args])


@app.command(context_settings=ALL_TO_THE_COMMAND)
def runs(context: typer.Context) -> None:
    """List recorded runs, without a running server."""
    run_server(["runs", *context.args])


@app.command("show", context_settings=ALL_TO_THE_COMMAND)
def show_records(context: typer.Context) -> None:
    """Show the steps of a run, or the conversation of a trajectory."""
    run_server(["show", *context.args])


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="seed of the training requests and their order")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="total number of training steps  [default: enough for the full gain]")
    ] = None,
    json: Results = None,
    output: Annotated[Path, typer.Option(help="folder for all files that it writes")] = Path("offbook-quickstart"),
    engine: Annotated[str, typer.Option(help="inference engine: auto, embedded or vllm")] = "auto",
    loader: Annotated[str, typer.Option(help="loader of the base for training: auto, peft or unsloth")] = "auto",
) -> None:
    """Train a LangGraph agent on this machine, in minutes.

    The agent answers questions from a SQLite database. Its success rate is printed before and after training."""
    engines = EngineOptions.parse(engine=engine, loader=loader)
    part("offbook.quickstart.run", "langchain", "quickstart").main(seed, steps, output, json, engines)


@app.command()
def train(
    target: Target,
    scenarios: Scenarios,
    steps: Annotated[int, typer.Option(min=1, help="total number of steps; another run resumes")] = 50,
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on before and after training")] = None,
    eval_every: Annotated[int, typer.Option(min=0, help="steps between evaluations; 0: none")] = RunOptions.eval_every,
    group_size: Annotated[int, typer.Option(min=2, help="rollouts per scenario")] = RunOptions.group_size,
    scenarios_per_step: Annotated[int, typer.Option(min=1, help="scenarios per step")] = RunOptions.scenarios_per_step,
    concurrency: Concurrency = RunOptions.concurrency,
    timeout: Timeout = RunOptions.timeout,
    retries: Retries = RunOptions.retries,
    max_completion_tokens: MaxCompletion = None,
    patience: Patience = RunOptions.patience,
    target_reward: TargetReward = RunOptions.target_reward,
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
        **chosen_options(run=run, max_cost=max_cost, max_completion_tokens=max_completion_tokens),
        **model_option(model, base_model),
    }
    loaded = load_scenarios(scenarios)
    if eval is not None:
        options["eval"] = load_scenarios(eval)
    trainable = load_target(target)
    trainable.train(loaded, steps=steps, **(options | sinks_option(log, trace)))


@app.command("eval")
def evaluate(
    target: Target,
    scenarios: Scenarios,
    temperature: Temperature = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    concurrency: Concurrency = RunOptions.concurrency,
    timeout: Timeout = RunOptions.timeout,
    retries: Retries = RunOptions.retries,
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
    options: TargetOptions = {
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


@app.command("judge-check")
def judge_check(
    file: Annotated[Path, typer.Argument(help="JSONL of rollouts that you ranked: group, messages, and score or rank")],
    judge: Annotated[str, typer.Option(help="LLM to check, such as openai/o3")],
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    reasoning: Annotated[bool, typer.Option("--reasoning", help="let it reason before it scores")] = False,
    json: Results = None,
) -> None:
    """Compare a judge's ranking of rollouts with yours."""
    ranked = read_ranked(file)
    check = asyncio.run(check_judge_on(ranked, ruler_at(judge, judge_api_base, rubric, reasoning=reasoning)))
    typer.echo("\n".join(check.lines()))
    if json is not None:
        results = asdict(check) | {"tau": check.tau, "accuracy": check.accuracy}
        json.write_text(dumps(results, indent=1) + "\n", encoding="utf-8")
    if not check.groups:
        raise typer.Exit(1)


@app.command()
def checkpoints(model: Model, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    listed = list_checkpoints(model, url, dir)
    for checkpoint in listed:
        typer.echo(f"{checkpoint.step:5}  {checkpoint.path}")
    if not listed:
        typer.echo(f"model {model!r} is at step 0: nothing has been trained yet, so it has no checkpoints", err=True)


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="new folder on this machine")],
    format: Annotated[
        str,
        typer.Option(
            help="peft: the LoRA; merged: base and LoRA in one model; gguf-ready: the merged model for llama.cpp's converter"
        ),
    ] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="step of the checkpoint  [default: the newest]")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that other tools load.

    The tools are vLLM, transformers and llama.cpp's converter. With --url, the checkpoint is downloaded."""
    written = export_model(model, output, format, step, url, dir)
    typer.echo(written)
    if format == "gguf-ready":
        typer.echo(f"to convert it to one GGUF file: {convert_command(written)}", err=True)


@app.command()
def verify(
    dir: Dir = None,
    repair: Annotated[bool, typer.Option("--repair", help="move damaged parts aside and rebuild model.json")] = False,
) -> None:
    """Check the records, models and checkpoints of a directory.

    Exits with code 1 if any is damaged. No server may run on the directory."""
    run_server(["verify", "--dir", str(server_folder(dir)), *(["--repair"] if repair else [])])


@app.command()
def backup(output: Annotated[Path, typer.Option(help="new folder for the copy")], dir: Dir = None) -> None:
    """Copy the records, models and checkpoints of a directory.

    Its server may be running."""
    run_server(["backup", "--dir", str(server_folder(dir)), "--output", str(output.expanduser().absolute())])


def chosen_options(
    run: str | None = None, max_cost: float | None = None, max_completion_tokens: int | None = None
) -> TargetOptions:
    """The options that have a value; for the others, the target's own hold."""
    options = {"run": run, "max_cost": max_cost, "max_completion_tokens": max_completion_tokens}
    return cast(TargetOptions, {name: value for name, value in options.items() if value is not None})


def judge_option(model: str | None, api_base: str | None, rubric: Path | None) -> TargetOptions:
    """The option `judge=`, empty without `--judge`. Raises ConfigError for the judge's other options without it."""
    if model is None and (api_base, rubric) != (None, None):
        raise ConfigError("--judge-api-base and --rubric need --judge too, as in --judge openai/o3")
    return {} if model is None else {"judge": ruler_at(model, api_base, rubric)}


def model_option(name: str | None, base_model: str | None) -> TargetOptions:
    """The option `model=`, empty without `--model` and `--base-model`. Raises ConfigError for one without the other."""
    if name is None and base_model is None:
        return {}
    if name is None or base_model is None:
        option, missing = ("--base-model", "--model") if name is None else ("--model", "--base-model")
        raise ConfigError(
            f"{option} needs {missing} too, as in --model email-agent --base-model Qwen/Qwen2.5-7B-Instruct"
        )
    return {"model": TrainableModel(name, base_model=base_model)}


def sinks_option(log: Path | None, trace: str | None) -> TargetOptions:
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


def part(module: str, package: str, extra: str) -> Any:
    """Import a module that needs optional packages. Raises MissingExtraError if one is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offbook":
            raise
        raise MissingExtraError(error.name or package, extra) from error


def add_plugged_commands() -> None:
    """Add the commands of integrations. Each is an entry point to a `typer.Typer`, which is loaded when the command
    runs."""
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name in plugins.names(COMMANDS):
        if name not in own:
            text = plugins.summary(COMMANDS, name) or f"Plugin: see `offbook {name} --help`."
            app.command(name, context_settings=ALL_TO_THE_COMMAND, help=text)(run_plugged)


def run_plugged(context: typer.Context) -> None:
    """Pass the remaining arguments to an integration's command. Raises ConfigError if the entry point is no
    `typer.Typer`."""
    name = context.info_name or ""
    plugged = plugins.load(COMMANDS, name)
    if not isinstance(plugged, typer.Typer):
        raise ConfigError(
            f"plugin {name!r} in {COMMANDS!r} is a {type(plugged).__name__}, not a typer.Typer: fix its entry point"
        )
    plugged(context.args, prog_name=f"offbook {name}")


def main() -> None:
    """The console script."""
    add_plugged_commands()
    sys.exit(guarded(app))


def guarded(command: Callable[[], None]) -> int:
    """Run a command and return its exit code. An OffbookError is printed to stderr as one line."""
    try:
        command()
    except ConfigError as error:
        typer.echo(f"offbook: {error}", err=True)
        return 2
    except OffbookError as error:
        typer.echo(f"offbook: {error}", err=True)
        return 1
    except SystemExit as end:  # typer exits this way, also after Ctrl-C, which it does not report
        if end.code == INTERRUPTED:
            typer.echo("offbook: interrupted", err=True)
        raise
    return 0
