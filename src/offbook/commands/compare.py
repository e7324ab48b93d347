"""The command `offbook compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook.base.errors import ConfigError
from offbook.client.model import TrainableModel
from offbook.client.rollouts.sampling import MAX_COMPLETION_TOKENS
from offbook.comparison.compare import compare
from offbook.comparison.options import CompareOptions
from offbook.comparison.report import result_lines
from offbook.comparison.targets import ComparableTarget, bound_to
from offbook.contracts import Judge
from offbook.scenarios.loading import load_scenarios
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.trainer.judge_check import ruler_at
from offbook.trainer.trainable_target import load_target

from .options import (
    MAX_COMPLETION_HELP,
    BaseModel,
    JudgeBase,
    JudgeModel,
    MaxCost,
    ModelName,
    RubricFile,
    Scenarios,
    SuccessAt,
    Target,
    Temperature,
    Timeout,
    Trace,
)

Candidates = Annotated[
    list[str],
    typer.Option(
        "--with", help="candidate: step:0, step:newest, openai/gpt-4.1 or openai/NAME?api_base=URL; repeatable"
    ),
]
Baseline = Annotated[str | None, typer.Option(help="candidate to compare the others with  [default: the first]")]
Rollouts = Annotated[int, typer.Option(min=1, help="rollouts per scenario and candidate")]
GpuPrice = Annotated[float | None, typer.Option(min=0, help="USD per hour of the machine that serves trained steps")]
TrainedOn = Annotated[
    Path | None, typer.Option(help="training scenarios; the report warns about those that are also compared on")
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="number of rollouts that run at the same time  [default: 32, or the app's limit]"),
]
MaxCompletion = Annotated[int, typer.Option(min=1, help=MAX_COMPLETION_HELP)]
Output = Annotated[Path, typer.Option(help="folder for the report and the rollouts")]
Fresh = Annotated[bool, typer.Option("--fresh", help="repeat all rollouts, also those that an earlier run completed")]
Seed = Annotated[int, typer.Option(min=0, help="seed of shuffling and resampling")]


def compare_command(
    target: Target,
    scenarios: Scenarios,
    candidates: Candidates,
    baseline: Baseline = None,
    rollouts: Rollouts = 1,
    temperature: Temperature = 0.0,
    success_at: SuccessAt = None,
    judge: JudgeModel = None,
    judge_api_base: JudgeBase = None,
    rubric: RubricFile = None,
    gpu_price: GpuPrice = None,
    max_cost: MaxCost = None,
    trained_on: TrainedOn = None,
    concurrency: Concurrency = None,
    timeout: Timeout = CompareOptions.timeout,
    max_completion_tokens: MaxCompletion = MAX_COMPLETION_TOKENS,
    output: Output = CompareOptions.output,
    fresh: Fresh = False,
    seed: Seed = 0,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Run an app with several models and report the differences.

    Each candidate answers in place of the app's own model. The report has charts."""
    options: dict[str, Any] = {
        "baseline": baseline,
        "rollouts": rollouts,
        "temperature": temperature,
        "success_at": success_at,
        "gpu_price": gpu_price,
        "max_cost": max_cost,
        "trained_on": None if trained_on is None else load_scenarios(trained_on),
        "timeout": timeout,
        "max_completion_tokens": max_completion_tokens,
        "output": output,
        "fresh": fresh,
        "seed": seed,
        "judge": _judge(judge, judge_api_base, rubric),
        "sinks": resolve_sinks(named_sinks(trace, "--trace")) if trace is not None else (),
    }
    if concurrency is not None:
        options["concurrency"] = concurrency
    loaded = load_scenarios(scenarios)
    app, options["app_file"] = _app(target, model, base_model)
    typer.echo("\n".join(result_lines(compare(app, loaded, candidates, **options), output)))


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
            f"target: {target} is of type {type(loaded).__name__}, which cannot be answered by other models: name what "
            "offbook_langgraph.trainable(...) returned"
        )
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    own = None if name is None or base_model is None else TrainableModel(name, base_model=base_model)
    return (loaded if own is None else bound_to(loaded, own)), None if file is None else Path(file)
