"""Options that depend on the base model, where a user names none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from understudy import TrainConfig

from ..connection.servers import StdioServer
from ..connection.target import Target

GROUP_SIZE = 8
"""Rollouts of one scenario."""
TINY = "tiny"
TINY_RATE, TINY_KL = 3.3e-3, 0.3
"""Of the bundled policy's first step; both fall in a line. They are those of `understudy quickstart`."""


@dataclass(frozen=True)
class BaseDefaults:
    """max_tools: shown at once. result_chars, max_completion_tokens: what fits the context several times over."""

    max_tools: int | None = None
    result_chars: int | None = None
    max_completion_tokens: int = 1024
    scenarios_per_step: int = 4


def defaults_for(base_model: str) -> BaseDefaults:
    """The bundled policy reads up to eight tools, and 4,096 tokens."""
    if base_model == TINY:
        return BaseDefaults(max_tools=8, result_chars=1_500, max_completion_tokens=96, scenarios_per_step=8)
    return BaseDefaults()


def default_config(base_model: str, steps: int) -> TrainConfig | Callable[[int], TrainConfig]:
    """The learner's options."""
    return partial(_tiny_config, steps) if base_model == TINY else TrainConfig()


def _tiny_config(steps: int, step: int) -> TrainConfig:
    left = max(1 - (step - 1) / steps, 1 / steps)
    return TrainConfig(learning_rate=TINY_RATE * left, kl_coef=TINY_KL * left, minibatches=4)


def default_concurrency(target: Target) -> int:
    """Rollouts at once: fewer where each may have a process of its own."""
    return 16 if any(isinstance(server, StdioServer) for server in target.servers) else 32
