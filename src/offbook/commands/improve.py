"""The command `offbook improve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from offbook.auto.estimate import plan_lines
from offbook.auto.improvable_app import AppWithScenarios, WrappedApp
from offbook.auto.improve import Improver, ImproveStage
from offbook.auto.improve_options import IMITATION, ROUNDS_SET, SFT_RATE, ImproveOptions, divided
from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.terminal import echo
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.options import TrainerOptions
from offbook.trainer.trainable_target import load_target

from .generated_options import with_options
from .options import (
    BaseModel,
    JudgeBase,
    JudgeModel,
    ModelName,
    RubricFile,
    Scenarios,
    SftBatch,
    SftEpochs,
    SftRate,
    Target,
    Trace,
)
from .training import judge_option, model_option, sinks_option

Teacher = Annotated[
    str, typer.Option(help="model to imitate: as-is (the app's own), openai/gpt-4.1 or openai/NAME?api_base=URL")
]
MaxCost = Annotated[float | None, typer.Option(help="limit for other LLMs in all runs with this --output, in USD")]
HeldOut = Annotated[Path | None, typer.Option("--eval", help="held-out scenarios  [default: a quarter of --scenarios]")]


@with_options(TrainerOptions, ImproveOptions, without=ROUNDS_SET)
def improve(
    target: Target,
    scenarios: Scenarios,
    teacher: Teacher = "as-is",
    held_out: HeldOut = None,
    sft_epochs: SftEpochs = IMITATION.epochs,
    sft_learning_rate: SftRate = SFT_RATE,
    sft_batch_size: SftBatch = IMITATION.batch_size,
    learning_rate: Annotated[
        float, typer.Option(help="learning rate of the reinforcement learning")
    ] = TrainConfig().learning_rate,
    max_cost: MaxCost = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
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
    sft = SFTConfig.parse(
        epochs=sft_epochs, learning_rate=sft_learning_rate, batch_size=sft_batch_size, skip_bad=IMITATION.skip_bad
    )
    chosen, training = divided(options, teacher=teacher, max_cost=max_cost, sft=sft)
    training |= judge_option(judge, judge_api_base, rubric) | sinks_option(None, trace)
    training["config"] = TrainConfig.parse(learning_rate=learning_rate, seed=options["seed"])
    rows = load_scenarios(scenarios)
    held = () if held_out is None else load_scenarios(held_out)
    app = cast(WrappedApp, load_target(target))
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    own_model = model_option(model, base_model).get("model")
    wrapped = AppWithScenarios(app, rows, held, own_model, training, None if file is None else Path(file))
    improver = Improver(wrapped, chosen)
    if dry_run:
        echo("\n".join(plan_lines(improver.plan(), chosen.max_cost)))
    else:
        improver.run(until)
