"""The output of `offbook mcp train --dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from offbook import TrainableModel
from offbook.base.text import counted, one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.rollouts.agent_loop import LoopOptions
from offbook_mcp.scenarios.files import ScenarioSet


def plan_lines(
    pool: ServerPool,
    model: TrainableModel,
    scenarios: ScenarioSet | str,
    steps: int,
    options: Mapping[str, Any],
    loop: LoopOptions,
    max_tools: int | None,
    unused_judge: str = "",
) -> list[str]:
    """A line per stage. `scenarios` is a sentence if there are none yet. `unused_judge`: why the judge is not asked."""
    offered, left_out = len(pool.toolset.tools), pool.toolset.left_out
    shown = "all are shown"
    if max_tools is not None and offered > max_tools:
        shown = f"a rollout sees at most {max_tools}: its scenario's, and others"
    group, per_step = options.get("group_size"), options.get("scenarios_per_step", 0)
    lines = [
        f"target     {one_line(pool.target.shown())}",
        f"tools      {offered}; {shown}; {pool.sharing()}",
        *(f"           not called: {one_line(name, 64)} ({reason})" for name, reason in left_out.items()),
        f"scenarios  {scenarios if isinstance(scenarios, str) else _scenarios(scenarios)}",
        f"model      {model.name} on {model.base_model}, {model.backend!r}",
        f"steps      {steps}, each {counted(per_step, 'scenario')} x {group} rollouts, {options.get('concurrency')} at once, "
        f"at most {loop.max_turns} turns",
        f"judge      {(options.get('judge') and (unused_judge or 'an LLM')) or 'none: rewards come from execution'}",
    ]
    if not isinstance(scenarios, str) and (change := scenarios.server_change(pool.fingerprint)):
        lines.append(f"warning    {change}")
    return lines


def _scenarios(scenarios: ScenarioSet) -> str:
    listed = scenarios.scenarios
    return "\n".join(
        [
            f"{len(scenarios.train)} to train on, {len(scenarios.eval)} held out, hash {scenarios.digest[:16]}",
            f"           by tool: {_counts(tool for scenario in listed for tool in scenario.tools)}",
            f"           by difficulty: {_counts(str(scenario.difficulty) for scenario in listed)}",
        ]
    )


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{one_line(name, 64)} {count}" for name, count in sorted(Counter(names).items()))
