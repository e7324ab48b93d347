"""Combines an app that was wrapped without a model with the model that the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbook.base.errors import ConfigError
from offbook.base.types import Trajectory
from offbook.client.model import Model, TrainableModel
from offbook.contracts import Judge

from .targets import ComparableTarget


@dataclass(frozen=True)
class BoundTarget:
    """A ComparableTarget that runs `app` with `model` as its trained model."""

    app: ComparableTarget
    model: TrainableModel

    def own_models(self) -> tuple[TrainableModel, ...]:
        """The bound model."""
        return (self.model,)

    def own_judge(self) -> Judge | None:
        """The app's judge."""
        return self.app.own_judge()

    def most_at_once(self) -> int | None:
        """The app's limit of concurrent rollouts."""
        return self.app.most_at_once()

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """Run one rollout of the app; see ComparableTarget."""
        return await self.app.rollout_by(models, scenario, trajectory, judged=judged)


def bound_to(app: ComparableTarget, model: TrainableModel) -> ComparableTarget:
    """Bind the app to a model, which replaces its own. Raises ConfigError for an app with several models."""
    if len(app.own_models()) > 1:
        raise ConfigError("--model: the app has several models of its own, which one name cannot replace: leave it out")
    return BoundTarget(app, model)
