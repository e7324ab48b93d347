"""`generate_scenarios`: draws or writes scenarios for a target, runs them twice, selects and splits them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from offbook.base.errors import ConfigError
from offbook.base.text import one_line
from offbook.llms.llm import Llm
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target, TargetLike

from .execution import Progress, ScenarioGeneration
from .explore import explore, withheld_lines
from .from_llm import from_llm
from .from_schemas import from_schemas
from .scenario import HELD_OUT, ScenarioSet


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | Llm | None = None,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Generate up to `count` scenarios, every one run twice on the server. A share `held_out` of them is for evaluation.

    llm: the model that writes them ("openai/gpt-4.1", or an `Llm`); None: drawn from the schemas and the server's results.
    max_difficulty: 1 (one value) to 5 (three calls).
    progress: called with a line of text per event.
    Raises ConfigError for an invalid option, if there are far fewer scenarios than wanted or none can be held out, McpServerError, LlmError, BudgetExceeded.
    """
    if count < 1 or not 1 <= max_difficulty <= 5 or not 0 <= held_out < 1:
        raise ConfigError(
            "scenarios: count >= 1, 1 <= max_difficulty <= 5 and 0 <= held_out < 1 are needed, got "
            f"{count}, {max_difficulty} and {held_out}"
        )
    async with _opened(pool_or_target) as pool:
        for line in withheld_lines(pool.toolset.left_out):
            progress(line)
        work = ScenarioGeneration(pool, await explore(pool, seed=seed), count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    scenarios = work.result(held_out)
    check_enough(work, scenarios, held_out)
    for line in without_scenarios(work, scenarios):
        progress(line)
    return scenarios


@asynccontextmanager
async def _opened(pool_or_target: ServerPool | TargetLike) -> AsyncGenerator[ServerPool]:
    if isinstance(pool_or_target, ServerPool):
        yield pool_or_target
        return
    async with ServerPool(Target.parse(pool_or_target), ahead=1) as pool:
        yield pool


_ERRORS_SHOWN = 3
_FEW_HELD_OUT = 8
"""Held-out scenarios below which their success says little."""
_MIN_SHARE = 0.25
"""Share of the wanted scenarios below which a generation has failed: a run on them would measure nothing."""


def without_scenarios(work: ScenarioGeneration, scenarios: ScenarioSet) -> Iterator[str]:
    """A line for each tool that was used and has no scenario, with the reason."""
    taken = {name for scenario in scenarios.scenarios for name in scenario.tools}
    exploration = work.exploration
    for tool in work.pool.toolset.tools:
        name = tool.name
        if name in taken:
            continue
        if (reason := exploration.left_out.get(name)) is None:
            error = exploration.first_error(name)
            worked = any(observation.worked for observation in exploration.of(name))
            reason = (
                "its calls work, but no task on them was kept"
                if worked
                else f"no call of it worked: {error or 'all were empty'}"
            )
        yield f"no scenario: {one_line(name, 64)}: {one_line(reason, 300)}"


def few_held_out(scenarios: ScenarioSet, wanted: int, file: object) -> str | None:
    """What to do if so few of the scenarios are held out that success on them says little."""
    held_out = len(scenarios.eval)
    if held_out >= min(_FEW_HELD_OUT, round(HELD_OUT * wanted)):
        return None
    return f'{held_out} held out say little about success: write more with "split": "eval" in {file}'


def check_enough(work: ScenarioGeneration, scenarios: ScenarioSet, held_out: float) -> None:
    """Raise ConfigError, with reasons and remedies, for far fewer scenarios than wanted, or if none could be held out."""
    made, wanted = len(scenarios.scenarios), work.count
    unmeasured = bool(made) and held_out * wanted >= 1 and not scenarios.eval
    if made >= _MIN_SHARE * wanted and made and not unmeasured:
        return
    found = f"only {made} of {wanted}" if made else "none"
    if unmeasured:
        found += ", of which none can be held out to measure success,"
    raise ConfigError(
        f"scenarios: {found} could be made for {work.pool.target.shown()}: {_reasons(work)}{_advice(work, 0 if unmeasured else made)}"
    )


def _reasons(work: ScenarioGeneration) -> str:
    """Why there are so few, on one line."""
    reasons = [
        f"{number} {reason}" + (f" ({example})" if (example := work.examples.get(reason)) else "")
        for reason, number in work.dropped.most_common()
    ]
    reasons += withheld_lines(work.exploration.left_out)
    return one_line("; ".join(reasons), 600) or "no call gave anything new to ask for"


def _advice(work: ScenarioGeneration, enough: int) -> str:
    """An error of each tool for which no call worked, and what to do. `enough`: a count that would do; 0: none."""
    exploration = work.exploration
    tried = {observation.tool for observation in exploration.observations}
    worked = {observation.tool for observation in exploration.observations if observation.worked}
    errors = [(tool, error) for tool in sorted(tried - worked) if (error := exploration.first_error(tool))]
    shown = "".join(f"\nno call of {one_line(tool, 64)} worked: {error}" for tool, error in errors[:_ERRORS_SHOWN])
    ways: list[str] = []
    if exploration.left_out:
        ways.append("allow the tools that are left out")
    if errors:
        ways.append("list valid arguments in the tool's schema (`enum` or `examples`), or offer a tool that lists them")
    ways.append("use --llm, or write the scenarios yourself (docs/mcp_scenarios.md)")
    if enough:
        ways.append(f"or ask for fewer: --count {enough}")
    text = "; ".join(ways)
    return f"{shown}\n{text[0].upper()}{text[1:]}"
