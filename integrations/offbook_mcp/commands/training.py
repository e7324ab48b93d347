"""`offbook mcp train | eval | compare`."""

from __future__ import annotations

import asyncio
import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook import Ruler
from offbook.base.errors import ConfigError
from offbook.comparison.options import CompareOptions
from offbook.comparison.report import result_lines
from offbook.llms.llm import Llm
from offbook.tracing.sink_registry import resolve_sinks
from offbook.trainer.evaluate import printing_failures
from offbook.trainer.messages import evaluation_line
from offbook.trainer.report import TrainReport
from offbook_mcp.connection.target import Target
from offbook_mcp.training.comparison import tool_lines
from offbook_mcp.training.defaults import GROUP_SIZE, default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer, MCPTrainerOptions

from .chat import talk
from .model_options import (
    AllowWrites,
    BaseModel,
    ModelName,
    RunName,
    ScenarioFile,
    ServerDir,
    ServerUrl,
    model_from,
)
from .serve import serve
from .target_command import on_target

STEPS = 20
Candidates = Annotated[
    list[str],
    typer.Option(
        "--with", help="candidate (repeat for more): step:0, step:newest, openai/gpt-4.1, openai/name?api_base=URL"
    ),
]
Writer = Annotated[
    str | None, typer.Option(help="LLM that writes scenarios, such as openai/gpt-4.1; default: generated offline")
]
Count = Annotated[int, typer.Option(min=1, help="number of scenarios to generate if there are none")]
Probe = Annotated[
    int, typer.Option(min=0, help="rollouts of each new scenario; one that all or none solve is set aside; 0: keep all")
]
JudgeModel = Annotated[
    str | None, typer.Option("--judge", help="LLM that scores scenarios without a checkable answer (RULER)")
]
JudgeBase = Annotated[str | None, typer.Option(help="URL of the judge's endpoint; default: the provider's")]
LlmBase = Annotated[str | None, typer.Option(help="URL of the endpoint of --llm; default: the provider's")]
JudgeAll = Annotated[bool, typer.Option("--judge-all", help="make the judge's score half of every reward")]
MaxCost = Annotated[float | None, typer.Option(help="USD to spend on other LLMs; the run ends there")]
PerStep = Annotated[int | None, typer.Option(min=1, help="scenarios per step; default: 4, 8 for tiny-mcp and tiny")]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="rollouts at once; default: 16 if the target is a command, else 32")
]
MaxTurns = Annotated[int, typer.Option(min=1, help="model requests per rollout")]
MaxTools = Annotated[
    int | None, typer.Option(min=1, help="tools shown to the model; default: all, 8 for tiny-mcp and tiny")
]
Trace = Annotated[str | None, typer.Option(help="trace sinks, such as langfuse,wandb")]
Rate = Annotated[
    float | None, typer.Option(help="learning rate of AdamW; default: 1e-5; for tiny-mcp 2e-3, and it falls to zero")
]


def train(
    target: Target,
    model: ModelName = None,
    base: BaseModel = None,
    steps: Annotated[int, typer.Option(min=1, help="total steps; a second run resumes")] = STEPS,
    scenarios: ScenarioFile = None,
    count: Count = MCPTrainerOptions.count,
    llm: Writer = None,
    llm_api_base: LlmBase = None,
    allow_writes: AllowWrites = False,
    probe: Probe = MCPTrainerOptions.probe,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    judge_all: JudgeAll = False,
    max_cost: MaxCost = None,
    curriculum: Annotated[bool, typer.Option(help="train on easier scenarios first")] = MCPTrainerOptions.curriculum,
    group_size: Annotated[int, typer.Option(min=2, help="rollouts per scenario")] = GROUP_SIZE,
    scenarios_per_step: PerStep = None,
    max_turns: MaxTurns = MCPTrainerOptions.max_turns,
    max_tools: MaxTools = None,
    concurrency: Concurrency = None,
    learning_rate: Rate = None,
    trace: Trace = None,
    run: RunName = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed for scenarios and their order")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")] = False,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Train a model to use the server's tools.

    Generates scenarios, runs and scores rollouts, trains a LoRA, and compares success before and after.
    """
    named = model_from(target, model, base, dir, url)
    options: dict[str, Any] = {"count": count, "llm": writer_at(llm, llm_api_base), "allow_writes": allow_writes}
    options |= {"probe": probe, "judge_all": judge_all, "curriculum": curriculum, "group_size": group_size}
    options |= {"max_turns": max_turns, "seed": seed, "run": run, "say": typer.echo, "sinks": names_in(trace)}
    options |= {"config": default_config(named.base_model, steps, learning_rate)}
    options |= _chosen(judge, judge_api_base, max_cost, scenarios_per_step, max_tools, concurrency)
    trainer = MCPTrainer(target, named, scenarios, **options)
    if dry_run:
        typer.echo("\n".join(asyncio.run(trainer.aplan(steps))))
        return
    show(trainer, trainer.train(steps), dir)


def evaluate(
    target: Target,
    model: ModelName = None,
    base: BaseModel = None,
    scenarios: ScenarioFile = None,
    step: Annotated[int | None, typer.Option(min=0, help="step of the model; default: the newest")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario")] = 1,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    judge_all: JudgeAll = False,
    max_cost: MaxCost = None,
    max_turns: MaxTurns = MCPTrainerOptions.max_turns,
    max_tools: MaxTools = None,
    concurrency: Concurrency = None,
    trace: Trace = None,
    run: RunName = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Score one step on the held-out scenarios.

    Uses all scenarios if none is held out.
    """
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise ConfigError(f"--json: {json} cannot be written: a file in a folder that exists is needed")
    options: dict[str, Any] = {
        "judge_all": judge_all,
        "max_turns": max_turns,
        "run": run,
        "say": typer.echo,
        "sinks": names_in(trace),
        **_chosen(judge, judge_api_base, max_cost, None, max_tools, concurrency),
    }
    trainer = MCPTrainer(target, model_from(target, model, base, dir, url), scenarios, **options)
    with printing_failures():
        measured = trainer.evaluate(temperature=temperature, rollouts=rollouts, step=step)
    typer.echo(evaluation_line(measured))
    for line in tool_lines(measured.metrics):
        typer.echo(line)
    if json is not None:
        results = asdict(measured) | {"success": measured.success}
        json.write_text(json_format.dumps(results, indent=1) + "\n", encoding="utf-8")


def compare(
    target: Target,
    candidates: Candidates,
    model: ModelName = None,
    base: BaseModel = None,
    scenarios: ScenarioFile = None,
    baseline: Annotated[
        str | None, typer.Option(help="candidate to compare the others with; default: the first")
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="rollouts per scenario and candidate")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    gpu_price: Annotated[
        float | None, typer.Option(min=0, help="USD per hour of the machine that serves trained steps")
    ] = None,
    judge: Annotated[str | None, typer.Option("--judge", help="LLM that compares the candidates' rollouts")] = None,
    judge_api_base: JudgeBase = None,
    max_cost: MaxCost = None,
    max_turns: MaxTurns = MCPTrainerOptions.max_turns,
    max_tools: MaxTools = None,
    concurrency: Concurrency = None,
    output: Annotated[Path, typer.Option(help="folder for the report and the rollouts")] = CompareOptions.output,
    fresh: Annotated[bool, typer.Option("--fresh", help="ignore earlier rollouts and run everything again")] = False,
    trace: Trace = None,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Compare trained steps and other LLMs on held-out scenarios.

    Writes a report with charts.
    """
    chosen = _chosen(judge, judge_api_base, None, None, max_tools, concurrency)
    own: dict[str, Any] = {"max_turns": max_turns, "say": typer.echo, **chosen}
    trainer = MCPTrainer(target, model_from(target, model, base, dir, url), scenarios, **own)
    options: dict[str, Any] = {
        "baseline": baseline,
        "rollouts": rollouts,
        "temperature": temperature,
        "gpu_price": gpu_price,
        "max_cost": max_cost,
        "output": output,
        "fresh": fresh,
        "sinks": resolve_sinks(names_in(trace)),
    }
    typer.echo("\n".join(result_lines(trainer.compare(candidates, **options), output)))


def show(trainer: MCPTrainer, report: TrainReport, dir: Path | None) -> None:
    """Print the success before and after training, where the LoRA is, and how to export it."""
    if trainer.comparison is not None:
        typer.echo("\n" + "\n".join(trainer.comparison.lines()))
    if report.checkpoint is not None:
        where = f" --dir {dir}" if dir is not None else ""
        typer.echo(f"\nLoRA    {report.checkpoint}")
        typer.echo(f"export  offbook export {report.model} --output {report.model}-lora{where}")


def names_in(trace: str | None) -> list[str]:
    """Split `--trace` into names for the option `sinks=`."""
    return [] if trace is None else [name.strip() for name in trace.split(",")]


def writer_at(llm: str | None, api_base: str | None) -> Llm | None:
    """The LLM that writes scenarios; None without `--llm`. Raises ConfigError for an endpoint without a model."""
    if llm is None and api_base is not None:
        raise ConfigError("--llm-api-base needs --llm too, as in --llm openai/gpt-4.1")
    return None if llm is None else Llm(llm, **({"api_base": api_base} if api_base else {}))


def _chosen(
    judge: str | None,
    judge_api_base: str | None,
    max_cost: float | None,
    scenarios_per_step: int | None,
    max_tools: int | None,
    concurrency: int | None,
) -> dict[str, Any]:
    """The options that the user set; the others keep their defaults. Raises ConfigError."""
    options: dict[str, Any] = {}
    if judge is None and judge_api_base is not None:
        raise ConfigError("--judge-api-base needs --judge too, as in --judge openai/o3")
    if judge is not None:
        options["judge"] = Ruler(judge, api_base=judge_api_base)
    if max_cost is not None:
        options["max_cost"] = max_cost
    if scenarios_per_step is not None:
        options["scenarios_per_step"] = scenarios_per_step
    if max_tools is not None:
        options["max_tools"] = max_tools
    if concurrency is not None:
        options["concurrency"] = concurrency
    return options


def add_training_commands(app: typer.Typer) -> None:
    """Add the training commands to `offbook mcp`."""
    app.command("train")(on_target(train))
    app.command("eval")(on_target(evaluate))
    app.command("compare")(on_target(compare))
    app.command("chat")(on_target(talk))
    app.command("serve")(on_target(serve))
