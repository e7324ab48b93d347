"""`compare`: runs the same app on the same scenarios with every candidate as its model."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from offbook import __version__
from offbook.base.errors import ConfigError
from offbook.base.options import option, takes
from offbook.base.sync_calls import run_sync
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.client.model import Model, TrainableModel
from offbook.llms.ledger import budget
from offbook.scenarios.identity import scenario_id
from offbook.trainer.evaluate import summarise
from offbook.trainer.messages import failure_lines
from offbook.trainer.options import RewardFunction
from offbook.trainer.trainer import checked_scenarios

from .candidates import Candidate, CandidateLike, as_candidates
from .contamination import contamination_warnings, text_of, trained_ids
from .gateway import Gateway
from .journal import Journal, content_hash
from .judging import JudgedGroup, judge_side_by_side, win_rate
from .options import CompareOptions
from .report import write_report
from .results import (
    JUDGED,
    ComparisonReport,
    Scored,
    candidate_result,
    differing_samples,
    judged_values,
    scenario_values,
)
from .rollouts import SPLIT, OwnCalls, RolloutStage, grouped
from .targets import (
    ComparableTarget,
    CompareRollout,
    RolloutTarget,
    ServerTarget,
    answering_itself,
    as_target,
    trained_models,
)

logger = logging.getLogger("offbook")


ROWS = "rollouts.jsonl"
SAMPLES = 20
"""The most scenarios in the table of differing results."""


@dataclass(frozen=True)
class CompareArguments(CompareOptions):
    """Run the app on every scenario with each candidate as its model, and write the report to the folder `output`."""

    target: ComparableTarget | CompareRollout | ServerTarget
    scenarios: Sequence[object] | None = None  # of a server: its held-out ones
    candidates: Sequence[CandidateLike] = ()
    _: KW_ONLY
    model: TrainableModel | None = option(None, "the trained model, in place of a wrapped app's own")
    reward: RewardFunction | None = option(None, "(scenario, trajectory) -> reward, for a rollout function")


@takes(CompareArguments, "compare")
def compare(options: CompareArguments) -> ComparisonReport:
    """Sync form of `acompare`. Raises an error inside a running event loop."""
    return run_sync(_compared, options)


@takes(CompareArguments, "compare")
async def acompare(options: CompareArguments) -> ComparisonReport:
    """Run the app on every scenario with each candidate as its model, and write the report to the folder `output`.

    target: the result of `trainable`, a rollout function (model, scenario) -> Trajectory, or an MCPTrainer, whose held-out
    scenarios are compared. A second run reuses successful rollouts. Raises ConfigError, RolloutError, BudgetExceeded, and LlmError for an account that accepts no calls.
    """
    return await _compared(options)


async def _compared(options: CompareArguments) -> ComparisonReport:
    if isinstance(options.target, ServerTarget):
        return await _on_server(options.target, options)
    app = as_target(options.target, options.reward)
    own = trained_models(app, options.model)
    options = limited(options, app)
    chosen = checked_scenarios(options.scenarios or (), "scenarios")
    named = await _resolved(as_candidates(options.candidates), own)
    baseline = options.baseline or named[0].name
    if baseline not in [candidate.name for candidate in named]:
        raise ConfigError(
            f"baseline: {baseline!r} is not a candidate; the candidates are "
            f"{', '.join(candidate.name for candidate in named)}"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.output / ROWS)
    if journal.rows:
        logger.info(
            "%s of earlier runs are there; those that fit are used again: delete %s to run all anew",
            counted(len(journal.rows), "rollout"),
            options.output / ROWS,
        )
    judge = options.judge or app.own_judge()
    if options.judge is not None and len(named) < 2:
        raise ConfigError("candidates: a judge compares rollouts of at least two, got one")
    if any(candidate.as_is for candidate in named):
        answering_itself(app)
    llms = {candidate.name: candidate.llm for candidate in named if candidate.llm is not None}
    with budget(options.max_cost) as spending, Gateway(llms) as gateway:
        stage = RolloutStage(
            target=app,
            own=own,
            scenarios=chosen,
            options=options,
            journal=journal,
            gateway=gateway,
            run=options.run or _run_id(chosen, own),
            judged=judge is not None,
            own_calls=OwnCalls(next((item.prices for item in named if item.as_is), None)),
        )
        scored = [await _scored(stage, candidate) for candidate in named]
        warnings = await _warnings(stage, scored)
        groups = list[tuple[str, JudgedGroup]]()
        if judge is not None:
            rows = {item.candidate.name: item.rows for item in scored}
            groups, dropped = await judge_side_by_side(rows, judge)
            warnings += [f"the judge scored no rollout in {counted(dropped, 'group')}"] if dropped else []
    comparison = _comparison(stage, scored, baseline, groups, warnings, spending.lines())
    write_report(comparison, options.output)
    return comparison


async def _on_server(server: ServerTarget, options: CompareArguments) -> ComparisonReport:
    """Compare by the server's rollouts and scenarios, with the limits of its training where the options set none."""
    chosen: dict[str, Any] = {} if "concurrency" in options.passed else {"concurrency": server.concurrency}
    step_tokens = (
        options.max_completion_tokens if "max_completion_tokens" in options.passed else server.completion_tokens
    )
    judged = (options.judge or server.judge) is not None
    async with server.rollouts(judged=judged, step_tokens=step_tokens) as (rollout, own):
        if own.eval and options.trained_on is None:
            chosen["trained_on"] = own.train
        compared = options.scenarios or own.eval or own.scenarios
        target = RolloutTarget(rollout, judge=server.judge)
        return await _compared(replace(options, target=target, model=server.model, scenarios=compared, **chosen))


def limited(options: CompareArguments, app: ComparableTarget) -> CompareArguments:
    """The options, with the app's limit as the default concurrency. Raises ConfigError."""
    most = app.max_concurrency()
    if most is None:
        return options
    if "concurrency" not in options.passed:
        return replace(options, concurrency=most)
    if options.concurrency > most:
        raise ConfigError(f"concurrency: the app runs {most} rollout at a time, got {options.concurrency!r}")
    return options


async def _resolved(candidates: list[Candidate], own: Sequence[TrainableModel]) -> list[Candidate]:
    """Replace `step:newest` by its number, and check that steps exist. Raises ConfigError."""
    steps = [candidate for candidate in candidates if candidate.trained]
    if not steps:
        return candidates
    if not own:
        raise ConfigError(
            f"candidates: {steps[0].name}: the app was wrapped without a model: name it, by trainable(model=...), model=, or on "
            "the command line by --model and --base-model"
        )
    newest = min([await model.get_step() for model in own])
    kept = {model.name: {0, newest} | {state.step for state in await model.checkpoints()} for model in own}
    resolved_candidates: list[Candidate] = []
    for candidate in candidates:
        step = newest if candidate.trained and candidate.step is None else candidate.step
        for name, steps_kept in kept.items():
            if step is not None and step not in steps_kept:
                known = ", ".join(map(str, sorted(steps_kept)))
                raise ConfigError(f"candidates: {name!r} has no step {step}; there are {known}")
        resolved = candidate if not candidate.trained else Candidate(f"step:{step}", step=step)
        if resolved.name in [other.name for other in resolved_candidates]:
            logger.warning("step:newest is %s, which is a candidate already", resolved.name)
            continue
        resolved_candidates.append(resolved)
    return resolved_candidates


async def _scored(stage: RolloutStage, candidate: Candidate) -> Scored:
    """Run and evaluate one candidate, and log the result with the server."""
    rows = await stage.rows(candidate)
    groups = grouped(rows, stage.scenarios)
    evaluation = summarise(groups, {candidate.name: candidate.step or 0}, stage.options.temperature)
    scored = Scored(candidate, rows, evaluation)
    own = stage.own
    if own:
        logged_model: Model[Any] = own[0]
        if not candidate.trained:
            logged_model = Model(candidate.record_name, own[0].project)
            await logged_model.register(own[0].backend)
        await logged_model.log(groups, split=SPLIT, metrics=scored.as_metrics(), step=candidate.step)
    for line in failure_lines([kind for kind in evaluation.failures if kind.type]):
        logger.warning("%s: %s", candidate.name, line)
    return scored


async def _warnings(stage: RolloutStage, scored: Sequence[Scored]) -> list[str]:
    """Warnings about limits of the comparison: contamination, failures, truncated answers, unknown prices."""
    options, warnings = stage.options, list[str]()
    recorded: set[str] = set()
    own = stage.own
    if own and any(item.candidate.trained and item.candidate.step for item in scored):
        recorded = await trained_ids(await own[0].api(), [model.name for model in own])
    warnings += contamination_warnings(stage.scenarios, options.trained_on, recorded)
    for item in scored:
        if item.failed:
            warnings.append(
                f"{item.candidate.name}: {item.failed} of {counted(len(item.rows), 'rollout')} failed, and count for nothing"
            )
        cut = sum(call.cut for row in item.rows for call in row.calls)
        if cut:
            warnings.append(
                f"{item.candidate.name}: {counted(cut, 'answer')} reached the limit of tokens (max_completion_tokens="
                f"{options.max_completion_tokens}, or the app's own)"
            )
        if not item.candidate.trained and any(call.cost is None for row in item.rows for call in row.calls):
            warnings.append(
                f"{item.candidate.name}: its price is unknown; give prompt_price= and completion_price= in USD per million "
                "tokens"
            )
    if options.gpu_price is None and any(item.candidate.trained for item in scored):
        warnings.append(
            "the cost of trained steps is unknown without gpu_price= (--gpu-price), USD per hour of the machine"
        )
    return warnings


def _comparison(
    stage: RolloutStage,
    scored: Sequence[Scored],
    baseline: str,
    groups: Sequence[tuple[str, JudgedGroup]],
    warnings: Sequence[str],
    spending: Sequence[str],
) -> ComparisonReport:
    options = stage.options
    measure, values = scenario_values(scored, options.success_at)
    if measure is None and groups:
        measure, values = JUDGED, [judged_values(groups, item.candidate.name) for item in scored]
    by_name = {item.candidate.name: own for item, own in zip(scored, values, strict=True)}
    results = tuple(
        candidate_result(
            item,
            by_name[item.candidate.name],
            None if item.candidate.name == baseline else by_name[baseline],
            success_at=options.success_at,
            gpu_price=options.gpu_price,
        )
        for item in scored
    )
    rates = [win_rate(groups, name, baseline) for name in by_name if name != baseline]
    texts = {scenario_id(item): text_of(item) for item in stage.scenarios}
    return ComparisonReport(
        run=stage.run,
        measure=measure,
        baseline=baseline,
        candidates=results,
        win_rates=tuple(rate for rate in rates if rate is not None),
        samples=differing_samples(scored, texts, values, SAMPLES),
        warnings=tuple(warnings),
        settings=_settings(stage, scored),
        spending=tuple(spending),
    )


def _settings(stage: RolloutStage, scored: Sequence[Scored]) -> dict[str, Json]:
    """The settings that produced the numbers, for the report."""
    options = stage.options
    return {
        "scenarios": len(stage.scenarios),
        "scenarios_hash": _scenarios_hash(stage.scenarios),
        "rollouts": options.rollouts,
        "temperature": options.temperature,
        "max_completion_tokens": options.max_completion_tokens,
        "concurrency": options.concurrency,
        "success_at": options.success_at,
        "judge": None if not stage.judged else repr(options.judge or stage.target.own_judge()),
        "gpu_price": options.gpu_price,
        "candidates": {item.candidate.name: item.candidate.fingerprint for item in scored},
        "models": [f"{model.name} on {model.base_model}" for model in stage.own],
        "offbook": __version__,
        "python": platform.python_version(),
    }


def _run_id(scenarios: Sequence[object], own: Sequence[TrainableModel]) -> str:
    """The run's id. It does not depend on the candidates, so a candidate added later belongs to the same run."""
    names = [model.name for model in own]
    digest = hashlib.sha256(" ".join([_scenarios_hash(scenarios), *names]).encode()).hexdigest()[:12]
    return "-".join(["compare", *names[:1], digest])


def _scenarios_hash(scenarios: Sequence[object]) -> str:
    parts = [f"{scenario_id(scenario)} {content_hash(scenario)}" for scenario in scenarios]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
