"""The state of a run that is stored with the model, so that a later run can resume."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from offbook import TrainableModel

from .curriculum import CurriculumState

KEY = "mcp"
"""Key in the model's state."""


class Measured(BaseModel):
    """Means over held-out scenarios at one step: `success`, `success.TOOL`, and the parts of the reward. `scored`: number of
    scenarios with a score; None: kept by a version that did not count them."""

    model_config = ConfigDict(frozen=True)

    step: int
    rates: dict[str, float]
    scored: int | None = None


class TrainingState(BaseModel):
    """The stored state. `scenarios` is the hash of the scenarios that it belongs to."""

    scenarios: str
    curriculum: CurriculumState | None = None
    before: Measured | None = None
    after: Measured | None = None

    @classmethod
    async def of(cls, model: TrainableModel, scenarios: str) -> TrainingState:
        """Read the state stored with the model; a new one if there is none, or it belongs to other scenarios."""
        kept = (await model.read_state()).get(KEY)
        try:
            state = cls.model_validate(kept)
        except ValidationError:  # no state, or one of another version: the curriculum starts over
            return cls(scenarios=scenarios)
        return state if state.scenarios == scenarios else cls(scenarios=scenarios)

    async def keep(self, model: TrainableModel) -> None:
        """Store this state with the model."""
        await model.merge_state({KEY: self.model_dump(mode="json")})
