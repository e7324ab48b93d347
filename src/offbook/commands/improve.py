"""The command `offbook improve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from offbook.auto.estimate import plan_lines
from offbook.auto.improvable_app import AppWithScenarios, WrappedApp
from offbook.auto.improve import Improver, ImproveStage
from offbook.auto.improve_options import ROUNDS_SET, ImproveOptions
from offbook.base.config import TrainConfig
from offbook.base.terminal import echo
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.options import TrainerOptions
from offbook.trainer.trainable_target import load_target

from .generated_options import options_of, with_options
from .options import ImitationOptions, JudgeOptions, ModelOptions, Scenarios, Target, Trace
from .training import judge_option, model_option, sinks_option, train_config

Teacher = Annotated[
    str, typer.Option(help="model to imitate: as-is (the app's own), openai/gpt-4.1 or openai/NAME?api_base=URL")
]
MaxCost = Annotated[float | None, typer.Option(help="limit for other LLMs in all runs with this --output, in USD")]
HeldOut = Annotated[Path | None, typer.Option("--eval", help="held-out scenarios  [default: a quarter of --scenarios]")]


@with_options(
    ImproveOptions, TrainerOptions, TrainConfig, ImitationOptions, JudgeOptions, ModelOptions, without=ROUNDS_SET
)
def improve(
    target: Target,
    scenarios: Scenarios,
    teacher: Teacher = "as-is",
    held_out: HeldOut = None,
    max_cost: MaxCost = None,
    trace: Trace = None,
    until: Annotated[ImproveStage, typer.Option(help="last stage to run")] = "compare",
    dry_run: Annotated[bool, typer.Option(help="show what each stage will take, and run nothing")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Replace an app's model with one that you train.

    The command observes the app on its own model, imitates the good runs, trains while held-out success rises, and
    compares both models. If Ctrl-C or a crash ends it, the same command continues.

    \b
    Example:
      offbook improve my_app:agent --scenarios tasks.jsonl
    """
    sft = ImitationOptions(**options_of(ImitationOptions, options)).config()
    path: dict[str, Any] = {"teacher": teacher, "max_cost": max_cost, "sft": sft}
    chosen = ImproveOptions(**path, **options_of(ImproveOptions, options))
    training = options_of(TrainerOptions, options) | {"config": train_config(options)}
    training |= judge_option(options) | sinks_option(trace)
    rows = load_scenarios(scenarios)
    held = () if held_out is None else load_scenarios(held_out)
    app = cast(WrappedApp, load_target(target))
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    own_model = model_option(options).get("model")
    wrapped = AppWithScenarios(app, rows, held, own_model, training, None if file is None else Path(file))
    improver = Improver(wrapped, chosen)
    if dry_run:
        echo("\n".join(plan_lines(improver.plan(), chosen.max_cost)))
    else:
        improver.run(until)
