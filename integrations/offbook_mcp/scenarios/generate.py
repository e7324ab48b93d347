"""`generate_scenarios`: draws or writes scenarios for a target, runs them twice, selects and splits them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from offbook.base.errors import ConfigError
from offbook.llms.llm import Llm
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target, TargetLike

from .coverage import check_enough, variable_hints, without_scenarios
from .explore import Exploration, explore, withheld_lines
from .files import ScenarioSet
from .from_llm import from_llm
from .from_schemas import from_schemas
from .generation import Progress, ScenarioGeneration


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | Llm | None = None,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    exploration: Exploration | None = None,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Generate up to `count` scenarios, every one run twice on the server. A share `held_out` of them is for evaluation.

    llm: the model that writes them ("openai/gpt-4.1", or an `Llm`); None: drawn from the schemas and the server's results.
    max_difficulty: 1 (one value) to 5 (three calls).
    exploration: an earlier result of `explore`; None explores now.
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
        exploration = exploration or await explore(pool, seed=seed)
        work = ScenarioGeneration(pool, exploration, count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    scenarios = work.result(held_out)
    check_enough(work, scenarios, held_out)
    for line in (*without_scenarios(work, scenarios), *variable_hints(pool, exploration)):
        progress(line)
    return scenarios


@asynccontextmanager
async def _opened(pool_or_target: ServerPool | TargetLike) -> AsyncGenerator[ServerPool]:
    """The pool, or a new one for the target."""
    if isinstance(pool_or_target, ServerPool):
        yield pool_or_target
        return
    async with ServerPool(Target.parse(pool_or_target), ahead=1) as pool:
        yield pool
