"""The command `understudy`: argv -> options -> one call. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from .client.commands import convert_command, export_model, list_checkpoints, run_server
from .client.model import TrainableModel
from .config import EngineOptions, LossName, TrainConfig, default_dir
from .doctor.examine import examine
from .doctor.page import as_json, console, show
from .errors import ConfigError, MissingExtraError, UnderstudyError
from .scenarios.loading import load_scenarios
from .tracing.jsonl import JsonlSink
from .trainer.messages import evaluation_line
from .trainer.options import RunOptions
from .trainer.target import TargetOptions, load_target

INTERRUPTED = 130
app = typer.Typer(
    name="understudy",
    help="Train a small open model to play the LLM's part in the agent you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Argument(help="what `trainable` returned, as module:name, such as my_app:agent")]
Scenarios = Annotated[Path, typer.Option(help="JSONL or CSV file, or folder[:split] of a saved Hugging Face dataset")]
Concurrency = Annotated[int, typer.Option(min=1, help="rollouts at once")]
Timeout = Annotated[float, typer.Option(help="seconds per rollout")]
Retries = Annotated[int, typer.Option(min=0, help="how often a rollout that fails is run again")]
MaxCompletion = Annotated[
    int | None, typer.Option(min=1, help="tokens of one completion, where the app sets no smaller limit")
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="name of the model, where the target was wrapped without")
]
BaseModel = Annotated[str | None, typer.Option(help="its base: a Hugging Face name, a folder, or tiny")]
Server = Annotated[str | None, typer.Option(help="URL of a running server; none: one on this machine")]
Dir = Annotated[Path | None, typer.Option(help="directory of the server's records; none: ./.understudy")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def serve(context: typer.Context) -> None:
    """Serve a model with OpenAI's API, record its calls, train it (`understudy serve --help` lists the options)."""
    run_server(context.args)


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
    patience: Annotated[
        int, typer.Option(min=1, help="iterations in a row without anything to train on that end the run")
    ] = RunOptions.patience,
    target_reward: Annotated[float, typer.Option(help="mean reward at which such an end is a success")] = (
        RunOptions.target_reward
    ),
    learning_rate: Annotated[float, typer.Option(help="AdamW's rate")] = TrainConfig().learning_rate,
    loss: Annotated[str, typer.Option(help=", ".join(get_args(LossName)))] = TrainConfig().loss,
    overlap: Annotated[bool, typer.Option(help="go on with the next step's rollouts during an update")] = False,
    seed: Annotated[int, typer.Option(min=0, help="seed of the scenarios' order")] = 0,
    log: Annotated[Path | None, typer.Option(help="folder for rollouts and steps as JSONL")] = None,
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
        **length_option(max_completion_tokens),
        **model_option(model, base_model),
    }
    loaded = load_scenarios(scenarios)
    if eval is not None:
        options["eval"] = load_scenarios(eval)
    found = load_target(target)
    if log is not None:
        options["sinks"] = [log_folder(log)]
    found.train(loaded, steps=steps, **options)


@app.command("eval")
def evaluate(
    target: Target,
    scenarios: Scenarios,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    concurrency: Concurrency = RunOptions.concurrency,
    timeout: Timeout = RunOptions.timeout,
    retries: Retries = RunOptions.retries,
    max_completion_tokens: MaxCompletion = None,
    json: Annotated[Path | None, typer.Option(help="file for the results")] = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Score the newest step on scenarios."""
    options: TargetOptions = {
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        **length_option(max_completion_tokens),
        **model_option(model, base_model),
    }
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise ConfigError(f"--json: {json} cannot be written: a file in a folder that exists is needed")
    loaded = load_scenarios(scenarios)
    found = load_target(target).evaluate(loaded, temperature=temperature, rollouts=rollouts, **options)
    typer.echo(evaluation_line(found))
    if json is not None:
        json.write_text(dumps(asdict(found) | {"success": found.success}, indent=1) + "\n", encoding="utf-8")


@app.command()
def checkpoints(model: str, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    for checkpoint in list_checkpoints(model, url, dir):
        typer.echo(f"{checkpoint.step:5}  {checkpoint.path}")


@app.command()
def export(
    model: str,
    output: Annotated[Path, typer.Option(help="new folder, on the server's machine")],
    format: Annotated[
        str, typer.Option(help="peft: the LoRA; merged: base and LoRA as one model; gguf-ready: that for llama.cpp")
    ] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="none: the newest")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that vLLM, transformers or llama.cpp's converter load."""
    written = export_model(model, output, format, step, url, dir)
    typer.echo(written)
    if format == "gguf-ready":
        typer.echo(f"one GGUF file of it: {convert_command(written)}", err=True)


@app.command()
def doctor(
    engine: Annotated[str, typer.Option(help="which one is looked at: auto, embedded, vllm")] = "auto",
    loader: Annotated[str, typer.Option(help="which one is looked at: auto, peft, unsloth")] = "auto",
    dir: Dir = None,
    json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show what is here, what is missing for which part, and the command that installs it; exit code 1 where the engine
    cannot run."""
    options = EngineOptions.parse(engine=engine, loader=loader)
    folder = (dir or default_dir()).expanduser().absolute()
    with Console(stderr=True).status("Asking torch and the engines ..."):
        report = examine(options, folder)
    if json:
        typer.echo(as_json(report))
    else:
        show(report, console())
    if not report.ok:
        raise typer.Exit(1)


def length_option(max_completion_tokens: int | None) -> TargetOptions:
    """The option `max_completion_tokens=`; without it, the target's own holds."""
    return {} if max_completion_tokens is None else {"max_completion_tokens": max_completion_tokens}


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


def main() -> None:
    """The console script."""
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
