"""`generate_scenarios`: draws or writes scenarios for a target, runs them twice, selects and splits them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from understudy.integration import ConfigError, Llm, one_line

from ..connection.pool import ServerPool
from ..connection.target import Target, TargetLike
from .explore import Exploration, explore
from .files import ScenarioSet
from .from_llm import from_llm
from .from_schemas import from_schemas
from .generation import Progress, ScenarioGeneration

_ERRORS_SHOWN = 3


async def generate_scenarios(
    pool_or_target: ServerPool | TargetLike,
    *,
    count: int = 48,
    seed: int = 0,
    llm: str | Llm | None = None,
    allow_writes: bool = False,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    exploration: Exploration | None = None,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Generate up to `count` scenarios, every one run twice on the server. A share `held_out` of them is for evaluation.

    llm: the model that writes them ("openai/gpt-4.1", or an `Llm`); None: drawn from the schemas and the server's results.
    allow_writes: also use tools that write or delete, every call in its own rollout.
    max_difficulty: 1 (one value) to 5 (three calls).
    exploration: an earlier result of `explore`; None explores now.
    progress: called with a line of text per event.
    Raises ConfigError for an invalid option or if no scenario is valid, McpServerError, LlmError, BudgetExceeded.
    """
    if count < 1 or not 1 <= max_difficulty <= 5 or not 0 <= held_out < 1:
        raise ConfigError(
            "scenarios: count >= 1, 1 <= max_difficulty <= 5 and 0 <= held_out < 1 are needed, got "
            f"{count}, {max_difficulty} and {held_out}"
        )
    async with _opened(pool_or_target) as pool:
        exploration = exploration or await explore(pool, seed=seed, allow_writes=allow_writes)
        work = ScenarioGeneration(pool, exploration, count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    if not work.valid:
        raise ConfigError(f"scenarios: none could be made for {pool.target.shown()}: {_reasons(work)}{_advice(work)}")
    return work.result(held_out)


@asynccontextmanager
async def _opened(pool_or_target: ServerPool | TargetLike) -> AsyncGenerator[ServerPool]:
    """The pool, or a new one for the target."""
    if isinstance(pool_or_target, ServerPool):
        yield pool_or_target
        return
    async with ServerPool(Target.parse(pool_or_target), ahead=1) as pool:
        yield pool


def _reasons(work: ScenarioGeneration) -> str:
    """Why no scenario is valid, on one line."""
    reasons = [
        f"{number} {reason}" + (f" ({example})" if (example := work.examples.get(reason)) else "")
        for reason, number in work.dropped.most_common()
    ]
    reasons += [f"{name}: {why}" for name, why in work.exploration.left_out.items()]
    return one_line("; ".join(reasons), 600) or "nothing was tried"


def _advice(work: ScenarioGeneration) -> str:
    """An error of each tool for which no call worked, and what to do about it; "" if there is no such tool."""
    exploration = work.exploration
    tried = {observation.tool for observation in exploration.observations}
    worked = {observation.tool for observation in exploration.observations if observation.worked}
    errors = [(tool, error) for tool in sorted(tried - worked) if (error := exploration.first_error(tool))]
    if not errors:
        return ""
    shown = "".join(f"\nno call of {one_line(tool, 64)} worked: {error}" for tool, error in errors[:_ERRORS_SHOWN])
    return (
        f"{shown}\nNo valid arguments are known. List them in the tool's schema (`enum` or `examples`), offer a tool that "
        "lists them, use --llm, or write the scenarios yourself (docs/mcp_scenarios.md)"
    )
