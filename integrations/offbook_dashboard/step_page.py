"""`GET /runs/{run}/steps/{step}`: the groups of a step, those with the widest spread of rewards first, and its timeline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from offbook.server.records import overview
from offbook.server.records.overview import CallTimes, RolloutRow
from offbook.server.views.numbers import DASH, fixed, number, seconds
from offbook.server.views.run_index import TrainUpdate
from offbook.server.views.run_source import RunOverview
from offbook.server.views.run_summary import Fact, run_name

from .page_urls import number_of
from .rendering import Crumb, SourceDep, UnknownPage, page, run_crumbs
from .run_charts import evaluations_by_split, held_out_losses, score
from .run_page import known_run
from .step_groups import MIN_GROUP_SIZE, UNTRAINED, GroupLine, group_lines
from .timeline import Timeline, timeline

router = APIRouter()

GROUPS_SHOWN = 100
"""Groups on one page."""


@router.get("/runs/{run}/steps/{step}")
async def step_page(
    request: Request,
    run: str,
    step: str,
    source: SourceDep,
    split: Annotated[str | None, Query(max_length=500)] = None,
    page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1,
) -> HTMLResponse:
    """The page of a step. `split` selects rollouts, by default "train" if there are any; `at` a page of the groups."""
    run_overview = await known_run(source, run)
    step_number, all_rollouts = await _rollouts(run_overview, step, source)
    splits = list(dict.fromkeys(rollout.split or "" for rollout in all_rollouts))
    chosen = split if split in splits else "train" if "train" in splits else splits[0]
    rollouts = [rollout for rollout in all_rollouts if (rollout.split or "") == chosen]
    ids = {rollout.id for rollout in rollouts}
    updates = [update for update in run_overview.updates if not ids.isdisjoint(update.positions)]
    held_out = any(entry.split == chosen for entry in held_out_losses(run_overview.evaluations))
    supervised = updates[-1].supervised if updates else held_out
    lines = _lines(rollouts, updates, supervised=supervised, held_out=held_out)

    def read(connection: Connection) -> tuple[list[CallTimes], tuple[int | None, int | None]]:
        calls = overview.call_times(connection, [rollout.id for rollout in rollouts])
        if step_number is None:
            return calls, (None, None)
        return calls, overview.steps_around(connection, run_overview.run, step_number)

    calls, (before, after) = await source.read(read)
    shown = timeline(rollouts, calls, updates)
    tokens = sum(call.tokens for call in calls)
    facts = facts_of_step(rollouts, lines, updates, shown, tokens, supervised=supervised)
    context = {
        "run": run_overview.run,
        "step": step_number,
        "splits": splits,
        "split": chosen,
        "lines": lines[(page_number - 1) * GROUPS_SHOWN : page_number * GROUPS_SHOWN],
        "groups": len(lines),
        "learned": sum(line.learned for line in lines),
        "facts": [*facts, *_held_out(run_overview, step_number)],
        "supervised": supervised,
        "updates": updates,
        "timeline": shown,
        "before": before,
        "after": after,
        "page_number": page_number,
        "pages": max(1, -(-len(lines) // GROUPS_SHOWN)),
    }
    title = step_name(step_number)
    crumbs = run_crumbs(run_overview.run, Crumb(title))
    return page(request, "step.html", title, crumbs, context)


def _lines(
    rollouts: Sequence[RolloutRow], updates: Sequence[TrainUpdate], *, supervised: bool, held_out: bool
) -> list[GroupLine]:
    """The groups of a step. Supervised training needs no rewards, so it learns from each group or from none."""
    smallest = int(updates[-1].config.get("min_group_size", MIN_GROUP_SIZE)) if updates else MIN_GROUP_SIZE
    lines = group_lines(rollouts, smallest, updates[-1].min_reward if updates else None)
    if updates and updates[-1].config.get("distill") is not None:
        return [replace(line, why="" if line.failed < len(line.chips) else "all failed") for line in lines]
    if not supervised:
        return lines
    why = "" if any(update.applied for update in updates) else "held out" if held_out else "not trained"
    return [replace(line, why=why) for line in lines]


def step_name(step: int | None) -> str:
    """The title of a step."""
    return "Rollouts without a step" if step is None else f"Step {step}"


async def _rollouts(run_overview: RunOverview, part: str, source: SourceDep) -> tuple[int | None, list[RolloutRow]]:
    """The step that a path segment names, and its rollouts. Raises UnknownPage if there are none."""
    try:
        step = number_of(part)
    except ValueError:
        raise UnknownPage("Unknown step", f"{part!r} is not a step: a step is a number.") from None
    rollouts = await source.rollouts(run_overview.run, step) if step is None or 0 <= step < 2**31 else []
    if not rollouts:
        raise UnknownPage("Unknown step", f"The run {run_name(run_overview.run)!r} has no rollouts of step {part}.")
    return step, rollouts


def facts_of_step(
    rollouts: Sequence[RolloutRow],
    lines: Sequence[GroupLine],
    updates: Sequence[TrainUpdate],
    shown: Timeline | None,
    tokens: int,
    *,
    supervised: bool,
) -> list[Fact]:
    """Rollouts, reward or cross-entropy, trained groups, sampled tokens, times of the phases, and the result of the update."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None and not rollout.failed]
    mean, spread = (statistics.fmean(rewards), statistics.pstdev(rewards)) if rewards else (None, None)
    failed = sum(rollout.failed for rollout in rollouts)
    facts = [
        Fact("Rollouts", number(len(rollouts)), f"{failed} failed" if failed else "none failed"),
        Fact("Reward", fixed(mean, 3), f"spread {fixed(spread, 3)}"),
        _gradient(lines, updates),
    ]
    if supervised:
        facts[1:] = _learned_by_imitation(updates)
    facts.append(Fact("Sampled", number(tokens), "tokens"))
    if shown is not None:
        rate = tokens / shown.rollouts_end if shown.rollouts_end else None
        facts.append(Fact("Rollouts took", seconds(shown.rollouts_end), f"{number(rate)} tokens per second"))
    if updates:
        last = updates[-1]
        next_step = number(last.result_step) if last.applied else DASH
        note = "made from it" if last.applied else "nothing learned" if last.state == "done" else last.state
        facts.append(Fact("Next step", next_step, note))
        facts.append(Fact("Training took", seconds(last.metrics.get("seconds/total")), _tokens(last)))
    return facts


def _gradient(lines: Sequence[GroupLine], updates: Sequence[TrainUpdate]) -> Fact:
    """How many groups were trained, and why others were not: as the learner counted them, or without one count by the
    rewards."""
    least = updates[-1].min_reward if updates else None
    which = "groups whose rewards differ" if least is None else f"groups with a reward of at least {least:g}"
    metrics = updates[0].metrics if len(updates) == 1 else {}
    trained, total = metrics.get("groups/trained"), metrics.get("groups/total")
    if trained is None or total is None:
        return Fact("Gradient from", f"{sum(line.learned for line in lines)} of {len(lines)}", which)
    others = [f"{number(count)} {why}" for name, why in UNTRAINED.items() if (count := metrics.get(f"groups/{name}"))]
    return Fact("Gradient from", f"{number(trained)} of {number(total)}", ", ".join(others) or which)


def _learned_by_imitation(updates: Sequence[TrainUpdate]) -> list[Fact]:
    """The cross-entropy of supervised updates, several if an example was trained in several epochs, and their messages."""
    if not updates:
        return []
    first, last = updates[0], updates[-1]
    more = f"; {fixed(first.cross_entropy, 3)} in the first of {len(updates)} updates" if len(updates) > 1 else ""
    return [
        Fact("Cross-entropy", fixed(last.cross_entropy, 3), f"nats per token, before the update{more}"),
        Fact("Trained", number(last.metrics.get("calls/trained")), "messages"),
    ]


def _held_out(run_overview: RunOverview, step: int | None) -> list[Fact]:
    return [
        Fact("Held-out cross-entropy", fixed(score(entry), 3), f"nats per token, {entry.rollouts} examples")
        for entries in evaluations_by_split(held_out_losses(run_overview.evaluations)).values()
        for entry in entries
        if entry.step == step
    ]


def _tokens(update: TrainUpdate) -> str:
    trained = update.metrics.get("tokens/trained")
    return "" if trained is None else f"{number(trained)} tokens"
