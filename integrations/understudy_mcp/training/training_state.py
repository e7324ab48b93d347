"""What of a run is kept with the model, so that a run that goes on knows where it was."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from understudy import TrainableModel

from .curriculum import CurriculumState

KEY = "mcp"
"""Where in the model's state."""


class Measured(BaseModel):
    """Means over held-out scenarios at one step: `success`, `success.TOOL`, and the parts of the reward."""

    model_config = ConfigDict(frozen=True)

    step: int
    rates: dict[str, float]


class TrainingState(BaseModel):
    """`scenarios` is the hash of those that the rest belongs to."""

    scenarios: str
    curriculum: CurriculumState | None = None
    before: Measured | None = None
    after: Measured | None = None

    @classmethod
    async def of(cls, model: TrainableModel, scenarios: str) -> TrainingState:
        """The state kept with the model; a fresh one where it has none, or one of other scenarios."""
        kept = (await model.read_state()).get(KEY)
        try:
            state = cls.model_validate(kept)
        except ValidationError:  # none, or of another version: the run starts its curriculum anew
            return cls(scenarios=scenarios)
        return state if state.scenarios == scenarios else cls(scenarios=scenarios)

    async def keep(self, model: TrainableModel) -> None:
        """Replace what is kept with the model."""
        await model.merge_state({KEY: self.model_dump(mode="json")})
