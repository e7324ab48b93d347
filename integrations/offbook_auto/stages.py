"""Runs stages in order under the ledger of one folder. A stage whose results are there does nothing when it runs again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.base.errors import BudgetExceeded
from offbook.base.terminal import echo
from offbook.llms.ledger import SpendingTotals, budget

SPENT = "spending.jsonl"
"""The ledger in the folder: what all runs with it have spent."""

Stage = tuple[str, Callable[[], Awaitable[None]]]


@dataclass(frozen=True)
class StagesRun:
    """How far the stages came. `reached`: the last whole stage, "" for none; `stopped`: "budget" where `max_cost` is spent.
    `spending` covers all runs with the folder, by purpose."""

    reached: str = ""
    stopped: str = ""
    spending: Mapping[str, SpendingTotals] = field(default_factory=dict[str, SpendingTotals])


async def run_stages(stages: Sequence[Stage], until: str, folder: Path, max_cost: float | None) -> StagesRun:
    """Run the stages up to `until`. A spent `max_cost`, over all runs with the folder, ends them well; other errors pass."""
    folder.mkdir(parents=True, exist_ok=True)
    reached, stopped = "", ""
    with budget(max_cost, file=folder / SPENT) as spending:
        try:
            for name, run in stages:
                await run()
                reached = name
                if name == until:
                    break
        except BudgetExceeded as error:
            stopped = "budget"
            echo(f"{error}. What was made stays in {folder}: run it again with more, and it goes on")
        return StagesRun(reached, stopped, spending.by_purpose())
