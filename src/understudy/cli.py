"""The command `understudy`: argv -> options -> one call. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from .client.commands import export_model, installed, list_checkpoints, run_server
from .config import LossName, TrainConfig
from .errors import ConfigError, MissingExtraError, UnderstudyError
from .scenarios.loading import load_scenarios
from .tracing.jsonl import JsonlSink
from .trainer.target import load_target
from .trainer.trainer import Options, evaluation_line

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
) -> None:
    """Train a LangGraph agent over a real database on this machine, and watch it get better."""
    part("understudy.quickstart.run", "langchain", "quickstart").main(seed, steps, dir, json)


@app.command()
def train(
    target: Target,
    scenarios: Annotated[Path, typer.Option(help="JSONL or CSV file, one scenario per line")],
    steps: Annotated[int, typer.Option(min=1, help="steps in all; run again, it goes on")] = 50,
    eval: Annotated[Path | None, typer.Option(help="scenarios to evaluate on, before and after")] = None,
    group_size: Annotated[int, typer.Option(help="rollouts per scenario")] = Options.group_size,
    scenarios_per_step: Annotated[int, typer.Option(help="scenarios per step")] = Options.scenarios_per_step,
    concurrency: Annotated[int, typer.Option(help="rollouts at once")] = Options.concurrency,
    timeout: Annotated[float, typer.Option(help="seconds per rollout")] = Options.timeout,
    learning_rate: Annotated[float, typer.Option(help="AdamW's rate")] = TrainConfig().learning_rate,
    loss: Annotated[str, typer.Option(help=", ".join(get_args(LossName)))] = TrainConfig().loss,
    seed: Annotated[int, typer.Option(min=0, help="seed of the scenarios' order")] = 0,
    log: Annotated[Path | None, typer.Option(help="folder for rollouts and steps as JSONL")] = None,
) -> None:
    """Train a wrapped function or graph on scenarios."""
    config = TrainConfig.parse(learning_rate=learning_rate, loss=loss, seed=seed)
    loaded = load_scenarios(scenarios)
    held_out = load_scenarios(eval) if eval is not None else None
    load_target(target).train(
        loaded,
        steps=steps,
        eval=held_out,
        group_size=group_size,
        scenarios_per_step=scenarios_per_step,
        concurrency=concurrency,
        timeout=timeout,
        config=config,
        seed=seed,
        sinks=[JsonlSink(log)] if log is not None else [],
    )


@app.command("eval")
def evaluate(
    target: Target,
    scenarios: Annotated[Path, typer.Option(help="JSONL or CSV file, one scenario per line")],
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    concurrency: Annotated[int, typer.Option(help="rollouts at once")] = Options.concurrency,
) -> None:
    """Score the newest step on scenarios."""
    loaded = load_scenarios(scenarios)
    found = load_target(target).evaluate(loaded, temperature=temperature, rollouts=rollouts, concurrency=concurrency)
    typer.echo(evaluation_line(found))


@app.command()
def checkpoints(model: str, url: Server = None, dir: Dir = None) -> None:
    """List a model's checkpoints."""
    for checkpoint in list_checkpoints(model, url, dir):
        typer.echo(f"{checkpoint.step:5}  {checkpoint.path}")


@app.command()
def export(
    model: str,
    output: Annotated[Path, typer.Option(help="new folder, on the server's machine")],
    format: Annotated[str, typer.Option(help="peft: the LoRA; merged: base and LoRA as one model")] = "peft",
    step: Annotated[int | None, typer.Option(min=1, help="none: the newest")] = None,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Write a checkpoint as a folder that vLLM and transformers load."""
    typer.echo(export_model(model, output, format, step, url, dir))


@app.command()
def doctor() -> None:
    """Show what is installed here, and what is missing for which part."""
    for line in installed():
        typer.echo(line)


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
