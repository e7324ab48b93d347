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
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.trainable_target import load_target

from .generated_options import options_of, with_options
from .options import JudgeOptions, ModelOptions, Scenarios, Target, Trace
from .training import judge_option, model_option, sinks_option

Candidates = Annotated[
    list[str],
    typer.Option(
        "--with", help="candidate: step:0, step:newest, openai/gpt-4.1 or openai/NAME?api_base=URL; repeatable"
    ),
]
TrainedOn = Annotated[Path | None, typer.Option(help="training scenarios; the report warns if one of them is compared")]


@with_options(CompareOptions, JudgeOptions, ModelOptions, without=["app_file"])
def compare_command(
    target: Target,
    scenarios: Scenarios,
    candidates: Candidates,
    trained_on: TrainedOn = None,
    trace: Trace = None,
    *,
    options: dict[str, Any],
) -> None:
    """Run an app with several models and report the differences.

    Each candidate answers in place of the app's own model. The report has charts.

    \b
    Example:
      offbook compare my_app:agent --scenarios held_out.jsonl --with step:0 --with step:newest
    """
    chosen = options_of(CompareOptions, options) | judge_option(options) | sinks_option(trace)
    if trained_on is not None:
        chosen["trained_on"] = load_scenarios(trained_on)
    loaded = load_scenarios(scenarios)
    app, chosen["app_file"] = _app(target, model_option(options).get("model"))
    result = compare(app, loaded, candidates, **chosen)
    echo("\n".join(result_lines(result, chosen.get("output", CompareOptions.output))))


def _app(target: str, own: TrainableModel | None) -> tuple[ComparableTarget, Path | None]:
    """Load the app, bind it to the model of the options, and return it with its file. Raises ConfigError."""
    loaded: object = load_target(target)
    if not isinstance(loaded, ComparableTarget):
        raise ConfigError(
            f"target: {target} is of type {type(loaded).__name__}, whose calls other models cannot answer: name the "
            "object that offbook_langgraph.trainable(...) returned"
        )
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    return (loaded if own is None else bound_to(loaded, own)), None if file is None else Path(file)
