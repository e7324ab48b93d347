"""`offbook mcp train | eval`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook import Ruler
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.commands.generated_options import with_options
from offbook.commands.help_pages import more_option
from offbook.llms.llm import Llm
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.evaluate import printing_failures
from offbook.trainer.report import TrainReport
from offbook_mcp.connection.target import Target
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer, MCPTrainerOptions, tool_lines

from .chat import talk
from .options import (
    BaseName,
    ModelName,
    ScenarioFile,
    ServerDir,
    ServerUrl,
    model_from,
    on_target,
)
from .serve import serve

STEPS = 20
Writer = Annotated[
    str | None, typer.Option(help="LLM that writes scenarios, such as openai/gpt-4.1  [default: generated offline]")
]
JudgeModel = Annotated[
    str | None, typer.Option("--judge", help="LLM that scores scenarios without a checkable answer (RULER)")
]
JudgeBase = Annotated[str | None, more_option(help="URL of the judge's endpoint  [default: the provider's]")]
LlmBase = Annotated[str | None, more_option(help="URL of the endpoint of --llm  [default: the provider's]")]
Trace = Annotated[str | None, more_option(help="trace sinks, such as langfuse,wandb")]
Rate = Annotated[
    float | None,
    typer.Option(help="learning rate of AdamW  [default: 1e-5; falling: from 2e-3 for tiny-mcp, 3.3e-3 for tiny]"),
]


NOT_TRAINING = (
    "eval_every",
    "group_size",
    "scenarios_per_step",
    "replayed",
    "patience",
    "keep_checkpoints",
    "target_reward",
    "seed",
    "temperature",
    "count",
)
"""Options of an MCPTrainer that an evaluation does not read."""


@with_options(MCPTrainerOptions, without=["replayed"])  # only a loss that imitates replays, and no option chooses it
def train(
    target: Target,
    model: ModelName = None,
    base: BaseName = None,
    steps: Annotated[
        int, typer.Option(min=1, help="total number of steps; a second run continues where the first ended")
    ] = STEPS,
    scenarios: ScenarioFile = None,
    llm: Writer = None,
    llm_api_base: LlmBase = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    learning_rate: Rate = None,
    trace: Trace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
    dir: ServerDir = None,
    url: ServerUrl = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model to use the server's tools.

    Generates scenarios, runs and scores rollouts, trains a LoRA, and compares success before and after.

    \b
    Example:
      offbook mcp train 'mcp-server-time --local-timezone UTC' --dry-run
    """
    named = model_from(target, model, base, dir, url)
    options |= {"llm": writer_at(llm, llm_api_base), "say": echo}
    options |= {"config": default_config(named.base_model, steps, learning_rate)}
    options |= judge_option(judge, judge_api_base) | sinks_option(trace)
    trainer = MCPTrainer(target, named, scenarios, **options)
    if dry_run:
        echo("\n".join(asyncio.run(trainer.aplan(steps))))
        return
    show(trainer, trainer.train(steps), dir)


@with_options(MCPTrainerOptions, without=NOT_TRAINING)
def evaluate(
    target: Target,
    model: ModelName = None,
    base: BaseName = None,
    scenarios: ScenarioFile = None,
    step: Annotated[int | None, more_option(min=0, help="step of the model  [default: the newest]")] = None,
    temperature: Annotated[float, more_option(min=0, max=2, help="sampling temperature; 0 is greedy")] = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    trace: Trace = None,
    dir: ServerDir = None,
    url: ServerUrl = None,
    *,
    options: dict[str, Any],
) -> None:
    """Score one step on the held-out scenarios.

    Uses all scenarios if none is held out.
    """
    options |= {"say": echo, **judge_option(judge, judge_api_base), **sinks_option(trace)}
    trainer = MCPTrainer(target, model_from(target, model, base, dir, url), scenarios, **options)
    with printing_failures():
        measured = trainer.evaluate(temperature=temperature, rollouts=rollouts, step=step)
    echo(str(measured))
    for line in tool_lines(measured.metrics):
        echo(line)


def show(trainer: MCPTrainer, report: TrainReport, dir: Path | None) -> None:
    """Print the success before and after training, where the LoRA is, and how to export it."""
    if trainer.comparison is not None:
        echo("\n" + "\n".join(trainer.comparison.lines()))
    if report.checkpoint is not None:
        where = f" --dir {dir}" if dir is not None else ""
        echo(f"\nLoRA    {report.checkpoint}")
        echo(f"export  offbook export {report.model} --output {report.model}-lora{where}")


def sinks_option(trace: str | None) -> dict[str, Any]:
    """The option `sinks=`, empty without `--trace`. Raises ConfigError for an unknown sink."""
    return {} if trace is None else {"sinks": resolve_sinks(named_sinks(trace, "--trace"))}


def writer_at(llm: str | None, api_base: str | None) -> Llm | None:
    """The LLM that writes scenarios; None without `--llm`. Raises ConfigError for an endpoint without a model."""
    if llm is None and api_base is not None:
        raise ConfigError("--llm-api-base needs --llm too, as in --llm openai/gpt-4.1")
    return None if llm is None else Llm(llm, **({"api_base": api_base} if api_base else {}))


def judge_option(judge: str | None, api_base: str | None) -> dict[str, Any]:
    """The option `judge=`, empty without `--judge`. Raises ConfigError for its endpoint without it."""
    if judge is None and api_base is not None:
        raise ConfigError("--judge-api-base needs --judge too, as in --judge openai/o3")
    return {} if judge is None else {"judge": Ruler(judge, api_base=api_base)}


def add_training_commands(app: typer.Typer) -> None:
    """Add the training commands to `offbook mcp`."""
    app.command("train")(on_target(train))
    app.command("eval")(on_target(evaluate))
    app.command("chat")(on_target(talk))
    app.command("serve")(on_target(serve))
