"""`compare`: the same app, the same scenarios, and every candidate in its place."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from understudy.client.model import Model, TrainableModel
from understudy.contracts import Judge
from understudy.errors import ConfigError
from understudy.llms.ledger import budget
from understudy.scenarios.identity import scenario_id
from understudy.trainer.evaluate import summarise
from understudy.trainer.messages import failure_lines
from understudy.trainer.options import RewardFunction
from understudy.trainer.trainer import checked_scenarios, refuse_running_loop
from understudy.types import Json

from .candidates import Candidate, CandidateLike, as_candidates
from .contamination import contamination_warnings, text_of, trained_ids
from .gateway import Gateway
from .judged_groups import judge_side_by_side
from .options import CompareOptions, CompareSettings
from .report import write_report
from .results import ComparisonReport, Scored, candidate_result, differing_samples, scenario_values
from .rollouts import RolloutStage, grouped, log_rows
from .rows import Journal, content_hash
from .shown import show_to_sinks
from .targets import ComparableTarget, CompareRollout, as_target
from .winrates import WinRate, win_rate

log = logging.getLogger("understudy")

ROWS = "rollouts.jsonl"
SAMPLES = 20
"""Scenarios in the table of those on which candidates differ."""


def compare(
    target: ComparableTarget | CompareRollout,
    scenarios: Sequence[object],
    candidates: Sequence[CandidateLike],
    *,
    model: TrainableModel | None = None,
    reward: RewardFunction | None = None,
    **options: Unpack[CompareOptions],
) -> ComparisonReport:
    """`acompare`, outside an event loop."""
    refuse_running_loop("compare", "acompare")
    return asyncio.run(acompare(target, scenarios, candidates, model=model, reward=reward, **options))


async def acompare(
    target: ComparableTarget | CompareRollout,
    scenarios: Sequence[object],
    candidates: Sequence[CandidateLike],
    *,
    model: TrainableModel | None = None,
    reward: RewardFunction | None = None,
    **options: Unpack[CompareOptions],
) -> ComparisonReport:
    """Run the app on every scenario with each candidate in its model's place, and write the report into `output`. Run again,
    rollouts that ended well are not run again. `target` is what `trainable` returned, or a rollout function, for which
    `model` is the trained one and `reward` its score. Options are those of `CompareSettings`. Raises ConfigError,
    BudgetExceeded, and LlmError for an account that takes no calls."""
    app = as_target(target, model, reward)
    settings = settings_for(app, options)
    chosen = checked_scenarios(scenarios, "scenarios")
    named = await _resolved(as_candidates(candidates), app)
    baseline = settings.baseline or named[0].name
    if baseline not in [each.name for each in named]:
        raise ConfigError(f"baseline: {baseline!r} is no candidate; they are {', '.join(each.name for each in named)}")
    settings.output.mkdir(parents=True, exist_ok=True)
    rows = settings.output / ROWS
    if settings.fresh:
        rows.unlink(missing_ok=True)
    judge = settings.judge or app.own_judge()
    if settings.judge is not None and len(named) < 2:
        raise ConfigError("candidates: a judge compares rollouts of at least two, got one")
    llms = {each.name: each.llm for each in named if each.llm is not None}
    with budget(settings.max_cost) as spending, Gateway(llms) as gateway:
        stage = RolloutStage(
            target=app,
            scenarios=chosen,
            settings=settings,
            journal=Journal(rows),
            gateway=gateway,
            run=settings.run or _run_id(chosen, app),
            app=app_hash(settings.app_file),
            judged=judge is not None,
        )
        scored = [await _scored(stage, each) for each in named]
        warnings = await _warnings(stage, scored)
        wins = [] if judge is None else await _win_rates(scored, judge, baseline, settings.seed, warnings)
    comparison = _comparison(stage, scored, baseline, wins, warnings, spending.lines())
    await show_to_sinks(stage, scored, comparison)
    write_report(comparison, settings.output)
    return comparison


def settings_for(app: ComparableTarget, options: CompareOptions) -> CompareSettings:
    """The settings, with as many rollouts at once as the app can run. Raises ConfigError."""
    most = app.most_at_once()
    if most is not None:
        options = {"concurrency": most, **options}
    settings = CompareSettings.parse(**options)
    if most is not None and settings.concurrency > most:
        raise ConfigError(f"concurrency: the app runs {most} rollout at a time, got {settings.concurrency!r}")
    return settings


async def _win_rates(
    scored: Sequence[Scored], judge: Judge, baseline: str, seed: int, warnings: list[str]
) -> list[WinRate]:
    """Of every candidate against the baseline; groups that the judge dropped are warned of."""
    groups, dropped = await judge_side_by_side(scored, judge, seed)
    if dropped:
        warnings.append(f"the judge scored no rollout in {dropped} groups")
    others = [each.candidate.name for each in scored if each.candidate.name != baseline]
    rates = [win_rate(groups, name, baseline, seed=seed) for name in others]
    return [rate for rate in rates if rate is not None]


async def _resolved(candidates: list[Candidate], app: ComparableTarget) -> list[Candidate]:
    """Steps as numbers, checked to exist. Raises ConfigError."""
    own = app.own_models()
    steps = [each for each in candidates if each.trained]
    if not steps:
        return candidates
    if not own:
        raise ConfigError(
            f"candidates: {steps[0].name}: the app was wrapped without a model: name it, by trainable(model=...), model=, or on "
            "the command line by --model and --base-model"
        )
    newest = min([await model.get_step() for model in own])
    found: list[Candidate] = []
    for each in candidates:
        step = newest if each.trained and each.step is None else each.step
        if step is not None:
            await _check_step(own, step, newest)
        resolved = each if not each.trained else Candidate(f"step:{step}", step=step)
        if resolved.name in [other.name for other in found]:
            log.warning("step:newest is %s, which is a candidate already", resolved.name)
            continue
        found.append(resolved)
    return found


async def _check_step(models: Sequence[TrainableModel], step: int, newest: int) -> None:
    for model in models:
        kept = {0, newest} | {each.step for each in await model.checkpoints()}
        if step not in kept:
            raise ConfigError(
                f"candidates: {model.name!r} has no step {step}; there are {', '.join(map(str, sorted(kept)))}"
            )


async def _scored(stage: RolloutStage, candidate: Candidate) -> Scored:
    """One candidate's rollouts and evaluation, kept with the server."""
    rows = await stage.rows(candidate)
    groups = grouped(rows, stage.scenarios)
    evaluation = summarise(groups, {candidate.name: candidate.step or 0}, stage.settings.temperature)
    scored = Scored(candidate, rows, evaluation)
    own = stage.target.own_models()
    if own:
        keeper: Model[Any] = own[0]
        if candidate.llm is not None:
            keeper = Model(candidate.record_name, own[0].project)
            await keeper.register(own[0].backend)
        await log_rows(keeper, candidate.step, groups, scored.as_metrics())
    for line in failure_lines(scored.failures):
        log.warning("%s: %s", candidate.name, line)
    return scored


async def _warnings(stage: RolloutStage, scored: Sequence[Scored]) -> list[str]:
    """What a reader must know before believing the numbers."""
    settings, found = stage.settings, list[str]()
    recorded: set[str] = set()
    own = stage.target.own_models()
    if own and any(each.candidate.trained and each.candidate.step for each in scored):
        recorded = await trained_ids(await own[0].api(), [model.name for model in own])
    found += contamination_warnings(stage.scenarios, settings.trained_on, recorded)
    older = sum(row.app != stage.app for each in scored for row in each.rows)
    if older:
        found.append(f"{older} rollouts are of another version of the app's file; --fresh runs them again")
    for each in scored:
        if each.failed:
            found.append(f"{each.candidate.name}: {each.failed} of {len(each.rows)} rollouts failed, and are no zeros")
        cut = sum(call.cut for row in each.rows for call in row.calls)
        if cut:
            found.append(
                f"{each.candidate.name}: {cut} answers reached the limit of tokens (max_completion_tokens="
                f"{settings.max_completion_tokens}, or the app's own)"
            )
        if not each.candidate.trained and any(call.cost is None for row in each.rows for call in row.calls):
            found.append(
                f"{each.candidate.name}: its price is unknown; give prompt_price= and completion_price= in USD per million "
                "tokens"
            )
    if settings.gpu_price is None and any(each.candidate.trained for each in scored):
        found.append(
            "the cost of trained steps is unknown without gpu_price= (--gpu-price), USD per hour of the machine"
        )
    return found


def _comparison(
    stage: RolloutStage,
    scored: Sequence[Scored],
    baseline: str,
    wins: Sequence[WinRate],
    warnings: Sequence[str],
    spending: Sequence[str],
) -> ComparisonReport:
    settings = stage.settings
    measure, values = scenario_values(scored, settings.success_at)
    by_name = {each.candidate.name: own for each, own in zip(scored, values, strict=True)}
    results = tuple(
        candidate_result(
            each,
            by_name[each.candidate.name],
            None if each.candidate.name == baseline else by_name[baseline],
            success_at=settings.success_at,
            gpu_price=settings.gpu_price,
            seed=settings.seed,
        )
        for each in scored
    )
    texts = {scenario_id(each): text_of(each) for each in stage.scenarios}
    return ComparisonReport(
        run=stage.run,
        measure=measure,
        baseline=baseline,
        candidates=results,
        win_rates=tuple(wins),
        samples=differing_samples(scored, texts, values, SAMPLES),
        warnings=tuple(warnings),
        settings=_settings(stage, scored),
        spending=tuple(spending),
    )


def _settings(stage: RolloutStage, scored: Sequence[Scored]) -> dict[str, Json]:
    """What produced the numbers."""
    settings = stage.settings
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "scenarios": len(stage.scenarios),
        "scenarios_hash": _scenarios_hash(stage.scenarios),
        "app_hash": stage.app,
        "rollouts": settings.rollouts,
        "temperature": settings.temperature,
        "max_completion_tokens": settings.max_completion_tokens,
        "concurrency": settings.concurrency,
        "success_at": settings.success_at,
        "judge": None if not stage.judged else repr(settings.judge or stage.target.own_judge()),
        "gpu_price": settings.gpu_price,
        "seed": settings.seed,
        "candidates": {each.candidate.name: each.candidate.fingerprint for each in scored},
        "models": [f"{model.name} on {model.base_model}" for model in stage.target.own_models()],
        "understudy": package.__version__,
        "python": platform.python_version(),
    }


def _run_id(scenarios: Sequence[object], app: ComparableTarget) -> str:
    """The same for every candidate, so that one that joins later stands beside the others."""
    parts = [_scenarios_hash(scenarios), *(model.name for model in app.own_models())]
    return f"compare-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def _scenarios_hash(scenarios: Sequence[object]) -> str:
    parts = [f"{scenario_id(each)} {content_hash(each)}" for each in scenarios]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def app_hash(file: Path | None) -> str:
    """Of the app's file; empty for none."""
    try:
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"app_file: {file} cannot be read: {error}") from error
