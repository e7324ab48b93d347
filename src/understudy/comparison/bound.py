"""An app that was wrapped without a model, with the model that the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from understudy.client.model import Model, TrainableModel
from understudy.contracts import Judge
from understudy.errors import ConfigError
from understudy.types import Trajectory

from .targets import ComparableTarget


@dataclass(frozen=True)
class BoundTarget:
    """`app`, whose steps are those of `model`."""

    app: ComparableTarget
    model: TrainableModel

    def own_models(self) -> tuple[TrainableModel, ...]:
        return (self.model,)

    def own_judge(self) -> Judge | None:
        return self.app.own_judge()

    def most_at_once(self) -> int | None:
        return self.app.most_at_once()

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        return await self.app.rollout_by(models, scenario, trajectory, judged=judged)


def bound_to(app: ComparableTarget, model: TrainableModel) -> ComparableTarget:
    """The app with that model in place of its own. Raises ConfigError for an app with several."""
    if len(app.own_models()) > 1:
        raise ConfigError("--model: the app has several models of its own, which one name cannot replace")
    return BoundTarget(app, model)
