"""The output of `understudy mcp train --dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from understudy import TrainableModel
from understudy.integration import TrainerOptions

from ..connection.pool import ServerPool
from ..printable import one_line
from ..scenarios.files import ScenarioSet
from ..tools_page import sharing
from .agent_loop import LoopOptions


def plan_lines(
    pool: ServerPool,
    model: TrainableModel,
    scenarios: ScenarioSet | str,
    steps: int,
    options: TrainerOptions,
    loop: LoopOptions,
) -> list[str]:
    """A line per stage. `scenarios` is a sentence if there are none yet."""
    group, per_step = options.get("group_size"), options.get("scenarios_per_step")
    lines = [
        f"target     {one_line(pool.target.shown())}",
        f"tools      {len(pool.toolset.tools)}; {sharing(pool)}",
        f"scenarios  {scenarios if isinstance(scenarios, str) else _scenarios(scenarios)}",
        f"model      {model.name} on {model.base_model}, {model.backend!r}",
        f"steps      {steps}, each {per_step} scenarios x {group} rollouts, {options.get('concurrency')} at once, "
        f"at most {loop.max_turns} turns",
        f"judge      {(options.get('judge') and 'an LLM') or 'none: rewards come from execution'}",
    ]
    if not isinstance(scenarios, str):
        lines.insert(
            3, f"           by tool: {_counts(tool for scenario in scenarios.scenarios for tool in scenario.tools)}"
        )
        lines.insert(
            4, f"           by difficulty: {_counts(str(scenario.difficulty) for scenario in scenarios.scenarios)}"
        )
        if change := scenarios.server_change(pool.fingerprint):
            lines.append(f"warning    {change}")
    return lines


def _scenarios(scenarios: ScenarioSet) -> str:
    return f"{len(scenarios.train)} to train on, {len(scenarios.eval)} held out, hash {scenarios.digest[:16]}"


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{one_line(name, 64)} {count}" for name, count in sorted(Counter(names).items()))
