"""The command `offbook compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.client.model import TrainableModel
from offbook.comparison.compare import compare
from offbook.comparison.options import CompareOptions
from offbook.comparison.report import result_lines
from offbook.comparison.targets import ComparableTarget, bound_to
from offbook.contracts import Judge
from offbook.scenarios.loading import load_scenarios
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.judge_check import ruler_at
from offbook.trainer.trainable_target import load_target

from .generated_options import with_options
from .options import BaseModel, JudgeBase, JudgeModel, ModelName, RubricFile, Scenarios, Target, Trace

Candidates = Annotated[
    list[str],
    typer.Option(
        "--with", help="candidate: step:0, step:newest, openai/gpt-4.1 or openai/NAME?api_base=URL; repeatable"
    ),
]
TrainedOn = Annotated[Path | None, typer.Option(help="training scenarios; the report warns if one of them is compared")]


@with_options(CompareOptions, without=["app_file"])
def compare_command(
    target: Target,
    scenarios: Scenarios,
    candidates: Candidates,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    trained_on: TrainedOn = None,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
    *,
    options: dict[str, Any],
) -> None:
    """Run an app with several models and report the differences.

    Each candidate answers in place of the app's own model. The report has charts.

    \b
    Example:
      offbook compare my_app:agent --scenarios held_out.jsonl --with step:0 --with step:newest
    """
    options["judge"] = _judge(judge, judge_api_base, rubric)
    if trained_on is not None:
        options["trained_on"] = load_scenarios(trained_on)
    if trace is not None:
        options["sinks"] = resolve_sinks(named_sinks(trace, "--trace"))
    loaded = load_scenarios(scenarios)
    app, options["app_file"] = _app(target, model, base_model)
    echo("\n".join(result_lines(compare(app, loaded, candidates, **options), options["output"])))


def _judge(name: str | None, api_base: str | None, rubric: Path | None) -> Judge | None:
    """The judge from the options; None without `--judge`. Raises ConfigError."""
    if name is None and (api_base, rubric) != (None, None):
        raise ConfigError("--judge-api-base and --rubric need --judge too, as in --judge openai/o3")
    return None if name is None else ruler_at(name, api_base, rubric)


def _app(target: str, name: str | None, base_model: str | None) -> tuple[ComparableTarget, Path | None]:
    """Load the app, bind it to the model of the options, and return it with its file. Raises ConfigError."""
    if (name is None) != (base_model is None):
        raise ConfigError("--model and --base-model belong together, as in --model email-agent --base-model tiny")
    loaded: object = load_target(target)
    if not isinstance(loaded, ComparableTarget):
        raise ConfigError(
            f"target: {target} is of type {type(loaded).__name__}, whose calls other models cannot answer: name the "
            "object that offbook_langgraph.trainable(...) returned"
        )
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    own = None if name is None or base_model is None else TrainableModel(name, base_model=base_model)
    return (loaded if own is None else bound_to(loaded, own)), None if file is None else Path(file)
