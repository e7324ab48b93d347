"""The Trainer of a wrapped app, which checks that the selections match calls."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

from offbook import TrainableModel, Trainer, Trajectory, TrajectoryGroup
from offbook.base.errors import RolloutError
from offbook.trainer.options import TrainerOptions

from .origin_counts import OWN_MODEL, OriginCounts

logger = logging.getLogger("offbook")


class AgentTrainer(Trainer):
    """A Trainer that raises RolloutError when a selection matches no call.

    A misspelt selection would send the calls to the app's own model.
    """

    def __init__(
        self,
        models: Sequence[TrainableModel],
        rollout: Callable[[object, Any], Awaitable[Trajectory]],
        scenarios: Iterable[object],
        counts: OriginCounts,
        options: TrainerOptions,
    ) -> None:
        model = models[0] if len(models) == 1 else models
        super().__init__(cast(Any, model), rollout, scenarios, **options)
        self._counts = counts
        self._examined = False

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """After the first iteration, report the calls that went to the app's own model; None otherwise.

        Raises RolloutError when a selection matched no call.
        """
        if self._examined:
            return None
        self._examined = True
        self._check_taken()
        idle = self._idle() if any(rollout.reward is not None for group in groups for rollout in group) else []
        if idle and not self._counts.total:
            raise RolloutError(
                "no rollout of the first iteration called a LangChain chat model, so there is nothing to train: the wrapped "
                "function must run the app on its scenario"
            )
        if idle:
            raise RolloutError(
                f"model={{...}}: the selection of {', '.join(idle)} took no call in the first iteration. Where its part of the "
                "app is rarely reached, take more rollouts for an iteration (scenarios_per_step=, group_size=). The calls "
                f"were:\n{self._counts.lines()}"
            )
        return self._own_model_line()

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Log the calls that went to the app's own model. Raises RolloutError when no call went to a trained model."""
        self._check_taken()
        if not self._examined and (line := self._own_model_line()):
            logger.info(line)

    def _idle(self) -> list[str]:
        """Names of the models that got no call."""
        return [model.name for model in self.models if not self._counts.to(model.name)]

    def _check_taken(self) -> None:
        if self._counts.total and len(self._idle()) == len(self.models):
            raise RolloutError(
                "select=, exclude=: no call went to the policy, so this would be a run of the app's own models. The calls "
                f"were:\n{self._counts.lines()}"
            )

    def _own_model_line(self) -> str | None:
        count = self._counts.to(OWN_MODEL)
        if not count:
            return None
        calls = (
            "1 call that select= does not take went" if count == 1 else f"{count} calls that select= does not take went"
        )
        return f"{calls} to {OWN_MODEL}:\n{self._counts.lines(OWN_MODEL)}"
