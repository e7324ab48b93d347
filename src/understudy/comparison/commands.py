"""The command `understudy compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from understudy.client.model import TrainableModel
from understudy.client.sampling import MAX_COMPLETION_TOKENS
from understudy.config import MAX_TEMPERATURE
from understudy.contracts import Judge
from understudy.errors import ConfigError
from understudy.scenarios.loading import load_scenarios
from understudy.tracing.commands import named_sinks
from understudy.tracing.names import resolve_sinks
from understudy.trainer.judge_check import ruler_at
from understudy.trainer.target import load_target

from .bound import bound_to
from .compare import compare
from .options import CompareOptions, CompareSettings
from .results import ComparisonReport
from .tables import shown_interval
from .targets import ComparableTarget

Target = Annotated[str, typer.Argument(help="what `trainable` returned, as module:name, such as my_app:agent")]
Scenarios = Annotated[Path, typer.Option(help="JSONL or CSV file, or folder[:split] of a saved dataset")]
Candidates = Annotated[
    list[str], typer.Option("--with", help="step:0, step:newest, openai/gpt-4.1, openai/name?api_base=URL; repeat it")
]
Baseline = Annotated[str | None, typer.Option(help="candidate to compare the others with; none: the first")]
Rollouts = Annotated[int, typer.Option(min=1, help="rollouts per scenario and candidate")]
Temperature = Annotated[float, typer.Option(min=0, max=MAX_TEMPERATURE, help="0 is greedy")]
SuccessAt = Annotated[float | None, typer.Option(help="a rollout succeeds from this reward on")]
JudgeModel = Annotated[
    str | None, typer.Option("--judge", help="LLM that compares the candidates' rollouts, such as openai/o3")
]
JudgeBase = Annotated[str | None, typer.Option(help="URL of the judge's endpoint; none: the provider's")]
Rubric = Annotated[Path | None, typer.Option(help="file with the judge's rubric; none: the default")]
GpuPrice = Annotated[float | None, typer.Option(min=0, help="USD per hour of the machine of trained steps")]
MaxCost = Annotated[float | None, typer.Option(help="USD for other LLMs; then it ends, and goes on when run again")]
TrainedOn = Annotated[Path | None, typer.Option(help="training scenarios, to check against those compared on")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="rollouts at once; none: 32, or what the app can")]
Timeout = Annotated[float, typer.Option(help="seconds per rollout")]
MaxCompletion = Annotated[
    int, typer.Option(min=1, help="tokens of one completion, where the app sets no smaller limit")
]
Output = Annotated[Path, typer.Option(help="folder of the report and the rollouts")]
Fresh = Annotated[bool, typer.Option("--fresh", help="run everything again")]
Seed = Annotated[int, typer.Option(min=0, help="of shuffling and resampling")]
Trace = Annotated[str | None, typer.Option(help="where to show the rollouts, such as langfuse,wandb")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="name of the model, where the target was wrapped without")
]
BaseModel = Annotated[str | None, typer.Option(help="its base: a Hugging Face name, a folder, or tiny")]


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
    rubric: Rubric = None,
    gpu_price: GpuPrice = None,
    max_cost: MaxCost = None,
    trained_on: TrainedOn = None,
    concurrency: Concurrency = None,
    timeout: Timeout = CompareSettings.timeout,
    max_completion_tokens: MaxCompletion = MAX_COMPLETION_TOKENS,
    output: Output = CompareSettings.output,
    fresh: Fresh = False,
    seed: Seed = 0,
    trace: Trace = None,
    model: ModelName = None,
    base_model: BaseModel = None,
) -> None:
    """Run the app on scenarios with each candidate in its model's place; write a report with charts."""
    options: CompareOptions = {
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
    found, options["app_file"] = _app(target, model, base_model)
    typer.echo("\n".join(lines_of(compare(found, loaded, candidates, **options), output)))


def _judge(name: str | None, api_base: str | None, rubric: Path | None) -> Judge | None:
    """The judge of the options. Raises ConfigError."""
    if name is None and (api_base, rubric) != (None, None):
        raise ConfigError("--judge-api-base and --rubric need --judge too, as in --judge openai/o3")
    return None if name is None else ruler_at(name, api_base, rubric)


def _app(target: str, name: str | None, base_model: str | None) -> tuple[ComparableTarget, Path | None]:
    """The app, with the model of the options, and its file. Raises ConfigError."""
    if (name is None) != (base_model is None):
        raise ConfigError("--model and --base-model belong together, as in --model email-agent --base-model tiny")
    found: object = load_target(target)
    if not isinstance(found, ComparableTarget):
        raise ConfigError(
            f"target: {target} is of type {type(found).__name__}, which cannot be answered by other models: name what "
            "understudy_langgraph.trainable(...) returned"
        )
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    own = None if name is None or base_model is None else TrainableModel(name, base_model=base_model)
    return (found if own is None else bound_to(found, own)), None if file is None else Path(file)


def lines_of(comparison: ComparisonReport, output: Path) -> list[str]:
    """The result for a terminal, and where the rest is."""
    lines: list[str] = []
    for each in comparison.candidates:
        parts = [f"{each.name}:"]
        if each.value is not None:
            parts.append(f"{comparison.measure} {shown_interval(each.value)}")
        if each.difference is not None:
            parts.append(f"difference to {comparison.baseline} {shown_interval(each.difference, sign='+')}")
        parts += [f"pass@{k} {value:.3f}" for k, value in each.passes.items()]
        parts.append("cost unknown" if each.cost is None else f"{1000 * each.cost:.4g} USD per 1,000 rollouts")
        if each.latency is not None:
            parts.append(f"call p50 {each.latency[0]:.2g} s, p95 {each.latency[1]:.2g} s")
        parts += [f"{each.failed} of {each.rollouts} failed"] if each.failed else []
        lines.append(f"{parts[0]} {', '.join(parts[1:])}")
    for rate in comparison.win_rates:
        lines.append(f"{rate.candidate}: preferred to {rate.against} {shown_interval(rate.rate)}")
    lines += [f"note: {each}" for each in comparison.warnings]
    return [*lines, *comparison.spending, f"report: {output / 'report.html'}, {output / 'report.md'}"]
