"""`offbook mcp improve`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from offbook.auto.estimate import plan_lines
from offbook.auto.improve import Improver, ImproveStage
from offbook.auto.improve_options import ROUNDS_SET, ImproveOptions
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.options import ImitationOptions
from offbook.llms.ledger import budget
from offbook_mcp.connection.target import Target
from offbook_mcp.scenarios.files import ScenarioSet
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.improvable_server import ImprovableServer
from offbook_mcp.training.mcp_trainer import MCPTrainer, MCPTrainerOptions

from .model_options import BaseModel, ModelName, ScenarioFile, ServerDir, ServerUrl, model_from
from .training import JudgeBase, JudgeModel, LlmBase, Trace, Writer, judge_option, sinks_option, writer_at

RoundRate = Annotated[
    float | None, typer.Option(help="learning rate of the reinforcement learning  [default: 1e-5; 2e-3 for tiny-mcp]")
]


@with_options(ImproveOptions, MCPTrainerOptions, ImitationOptions, without=ROUNDS_SET)
def improve(
    target: Target,
    teacher: Annotated[
        str,
        typer.Option(help="model to imitate: openai/gpt-4.1, or openai/NAME?api_base=URL for an endpoint of your own"),
    ],
    model: ModelName = None,
    base: BaseModel = None,
    scenarios: ScenarioFile = None,
    llm: Writer = None,
    llm_api_base: LlmBase = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    learning_rate: RoundRate = None,
    max_cost: Annotated[
        float | None, typer.Option(help="limit for other LLMs in all runs with this --output, in USD")
    ] = None,
    trace: Trace = None,
    until: Annotated[ImproveStage, typer.Option(help="last stage to run")] = "compare",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what each stage will take, and run nothing")] = False,
    dir: ServerDir = None,
    url: ServerUrl = None,
    *,
    options: dict[str, Any],
) -> None:
    """Imitate a large model's tool use, then train further.

    Generates scenarios, runs them on the teacher, and imitates the good runs. Then trains while held-out success rises,
    and compares both models. If Ctrl-C or a crash ends the command, the same command continues."""
    named = model_from(target, model, base, dir, url)
    sft = ImitationOptions(**options_of(ImitationOptions, options)).config()
    path: dict[str, Any] = {"teacher": teacher, "max_cost": max_cost, "sft": sft}
    chosen = ImproveOptions(**path, **options_of(ImproveOptions, options))
    training = options_of(MCPTrainerOptions, options)
    if chosen.teaching().as_is:
        raise ConfigError("--teacher: a server has no model of its own: name an LLM, such as openai/gpt-4.1")
    training |= {"llm": writer_at(llm, llm_api_base), "say": echo}
    training |= judge_option(judge, judge_api_base) | sinks_option(trace)
    config = default_config(named.base_model, 1, learning_rate)
    trainer = MCPTrainer(target, named, scenarios, config=config(1) if callable(config) else config, **training)
    (_plan if dry_run else _run)(trainer, chosen, until)


def _plan(trainer: MCPTrainer, chosen: ImproveOptions, _: ImproveStage) -> None:
    improver = Improver(ImprovableServer(trainer, trainer.existing()), chosen)
    echo("\n".join(plan_lines(improver.plan(), chosen.max_cost)))


def _run(trainer: MCPTrainer, chosen: ImproveOptions, until: ImproveStage) -> None:
    """Make the scenarios if there are none, then improve the model on them."""
    with budget(chosen.max_cost):
        known = asyncio.run(_scenarios(trainer))
    Improver(ImprovableServer(trainer.with_model(trainer.model, known), known), chosen).run(until)


async def _scenarios(trainer: MCPTrainer) -> ScenarioSet:
    async with trainer.rollouts() as (_, scenarios):
        return scenarios
