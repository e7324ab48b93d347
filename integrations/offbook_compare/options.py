"""The options of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offbook.base.config import MAX_TEMPERATURE
from offbook.base.errors import ConfigError
from offbook.base.options import Headline, option
from offbook.base.user_values import as_list
from offbook.client.rollouts.dataset import unpadded
from offbook.contracts import Judge
from offbook.trainer.options import RolloutOptions, check_evaluation, is_number


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RolloutOptions):
    """The options of a comparison. Raises ConfigError for an invalid value."""

    heading = "Comparison"

    baseline: str | None = option(None, "candidate to compare the others with", shown_default="the first")
    rollouts: Headline[int] = option(1, "rollouts per scenario and candidate", least=1)
    temperature: float | None = option(0.0, "sampling temperature; 0 is greedy", least=0, most=MAX_TEMPERATURE)
    judge: Judge | None = option(
        None, "judge that ranks the candidates' rollouts of a scenario; None: the app's own judge, if it has one"
    )
    success_at: float | None = option(
        None,
        "lowest reward that counts as a success",
        shown_default="the metric `success`; without it, rewards are compared",
    )
    gpu_price: float | None = option(None, "price of the machine that serves trained steps, in USD per hour", least=0)
    output: Headline[Path] = option(Path("comparison"), "folder for the report and the rollouts")
    trained_on: Iterable[object] | None = option(
        None, "scenarios that the model was trained on; the report warns if one of them is compared"
    )
    run: str | None = option(
        None, "name of the run in the server's lists", shown_default="derived from scenarios and models"
    )

    def __post_init__(self) -> None:
        check_evaluation(self.temperature, self.rollouts)
        super().__post_init__()
        if self.trained_on is not None:  # they are read several times
            object.__setattr__(self, "trained_on", as_list(unpadded(self.trained_on), "trained_on"))
        check_measure(self.success_at, self.gpu_price)
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"output: {self.output} is a file; a folder is needed")


def check_measure(success_at: float | None, gpu_price: float | None) -> None:
    """Raise ConfigError unless both are finite numbers or None, and the price is at least 0."""
    for name, value in (("gpu_price", gpu_price), ("success_at", success_at)):
        if value is not None and not (is_number(value) and math.isfinite(value)):
            raise ConfigError(f"{name}: a finite number is needed, got {value!r}")
    if gpu_price is not None and gpu_price < 0:
        raise ConfigError(f"gpu_price: USD per hour of at least 0 are needed, got {gpu_price!r}")
