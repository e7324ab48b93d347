"""Scenarios for a target: drawn or written, run twice, chosen, split."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from understudy.integration import ConfigError, Llm

from ..connection.pool import ServerPool
from ..connection.target import Target, TargetLike
from ..printable import one_line
from .explore import Exploration, explore
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
    allow_writes: bool = False,
    max_difficulty: int = 5,
    held_out: float = 0.25,
    exploration: Exploration | None = None,
    progress: Progress = lambda line: None,
) -> ScenarioSet:
    """Up to `count` scenarios that were run twice on the server, a share `held_out` of them for evaluation.

    llm: another model writes them ("openai/gpt-4.1", or an `Llm`); None: from the schemas and the server's own answers. allow_writes: use
    tools that write or delete, each time in a rollout of its own. exploration: what `explore` found before. progress: told
    what happens, a line at a time. Raises ConfigError for wrong options or where no scenario could be made, McpServerError.
    """
    if count < 1 or not 1 <= max_difficulty <= 5 or not 0 <= held_out < 1:
        raise ConfigError(
            "scenarios: count >= 1, 1 <= max_difficulty <= 5 and 0 <= held_out < 1 are needed, got "
            f"{count}, {max_difficulty} and {held_out}"
        )
    async with _opened(pool_or_target) as pool:
        found = exploration or await explore(pool, seed=seed, allow_writes=allow_writes)
        work = ScenarioGeneration(pool, found, count, seed, max_difficulty, progress)
        if llm is None:
            await from_schemas(work)
        else:
            await from_llm(work, llm if isinstance(llm, Llm) else Llm(llm))
    if not work.valid:
        raise ConfigError(f"scenarios: none could be made for {pool.target.shown()}: {_reasons(work)}")
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
    """Why nothing is valid, in one line."""
    reasons = [f"{number} {reason}" for reason, number in work.dropped.most_common()]
    reasons += [f"{name}: {why}" for name, why in work.found.left_out.items()]
    return one_line("; ".join(reasons), 600) or "nothing was tried"
