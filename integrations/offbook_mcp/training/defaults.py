"""Defaults that depend on the base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offbook import TrainConfig
from offbook_mcp.connection.servers import StdioServer
from offbook_mcp.connection.target import Target

GROUP_SIZE = 8
"""Rollouts of one scenario."""
TINY_RATES = {"tiny": 3.3e-3, "tiny-mcp": 2e-3}
"""Learning rates of the bundled policies at the first step. They decay linearly, as in `offbook quickstart`."""
TINY_KL = 0.3
"""Their KL coefficient at the first step, which decays with the rate."""


@dataclass(frozen=True)
class BaseDefaults:
    """Defaults for one base model.

    max_tools: shown to the model. most_tools: that its chat template can show. result_chars and max_completion_tokens: chosen so that several fit the context.
    """

    max_tools: int | None = None
    most_tools: int | None = None
    result_chars: int | None = None
    max_completion_tokens: int = 1024
    scenarios_per_step: int = 4


def defaults_for(base_model: str) -> BaseDefaults:
    """The defaults of a base model. The bundled policies have a context of 4,096 tokens, and are surest with eight tools or fewer."""
    if base_model in TINY_RATES:
        most = 16 if base_model == "tiny-mcp" else None
        return BaseDefaults(8, most, result_chars=1_500, max_completion_tokens=96, scenarios_per_step=8)
    return BaseDefaults()


def default_config(
    base_model: str, steps: int, rate: float | None = None
) -> TrainConfig | Callable[[int], TrainConfig]:
    """The learner's options, or a function from the step to them. `rate`: the learning rate, of the first step where it
    falls; None: the base's default. Raises ConfigError for a rate that is not positive."""
    fixed = TrainConfig.parse(**({} if rate is None else {"learning_rate": rate}))
    if base_model not in TINY_RATES:
        return fixed
    return partial(_tiny_config, TINY_RATES[base_model] if rate is None else rate, steps)


def _tiny_config(rate: float, steps: int, step: int) -> TrainConfig:
    left = max(1 - (step - 1) / steps, 1 / steps)
    return TrainConfig(learning_rate=rate * left, kl_coef=TINY_KL * left, minibatches=4)


def default_concurrency(target: Target) -> int:
    """How many rollouts run at once: fewer if every rollout may start its own process."""
    return 16 if any(isinstance(server, StdioServer) for server in target.servers) else 32
