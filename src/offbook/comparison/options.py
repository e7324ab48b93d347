"""The options of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict, Unpack

from offbook.base.errors import ConfigError
from offbook.base.option_names import check_options
from offbook.base.user_values import as_list
from offbook.client.rollouts.dataset import unpadded
from offbook.client.rollouts.sampling import MAX_COMPLETION_TOKENS
from offbook.contracts import Judge, TraceSink
from offbook.llms.ledger import check_max_cost
from offbook.trainer.judging import check_judge
from offbook.trainer.options import RunOptions, check_evaluation, check_place, is_number


class CompareOptions(TypedDict, total=False):
    """The options of `compare`; their defaults and meanings are those of `CompareSettings`."""

    baseline: str | None
    rollouts: int
    temperature: float | None
    judge: Judge | None
    success_at: float | None
    concurrency: int
    timeout: float
    max_completion_tokens: int
    max_cost: float | None
    gpu_price: float | None
    output: Path
    fresh: bool
    trained_on: Iterable[object] | None
    app_file: Path | None
    seed: int
    run: str | None
    sinks: Sequence[str | TraceSink]


@dataclass(frozen=True)
class CompareSettings:
    """The settings of a comparison. Raises ConfigError for an invalid value."""

    baseline: str | None = None  # name of the candidate to compare the others with; None: the first
    rollouts: int = 1  # per scenario and candidate
    temperature: float | None = 0.0  # of every call; None: the app's own
    judge: Judge | None = None  # ranks the candidates' rollouts of a scenario; None: the app's own, if it has one
    success_at: float | None = None  # smallest reward that counts as success; None: use the metric `success`
    concurrency: int = RunOptions.concurrency  # rollouts at once
    timeout: float = RunOptions.timeout  # seconds per rollout
    max_completion_tokens: int = MAX_COMPLETION_TOKENS  # limit per call, unless the app sets a smaller one
    max_cost: float | None = None  # USD for other LLMs, candidates and judge; beyond it the comparison ends
    gpu_price: float | None = None  # USD per hour of the machine that serves trained steps; None: unknown
    output: Path = Path("comparison")  # folder of the report and of the rollouts
    fresh: bool = False  # run everything again, and discard the folder's rollouts
    trained_on: Iterable[object] | None = None  # training scenarios, to detect overlap with the compared ones
    app_file: Path | None = None  # the app's source file: rollouts of another version of it give a warning
    seed: int = 0  # for shuffling and resampling
    run: str | None = None  # id of the run in the server's records; None: derived from scenarios and models
    sinks: Sequence[str | TraceSink] = ()

    @classmethod
    def parse(cls, **options: Unpack[CompareOptions]) -> CompareSettings:
        """Build settings from options. Raises ConfigError, also for an unknown option."""
        check_options("compare", options, ["model", "reward", *(option.name for option in fields(cls))])
        return cls(**options)

    def __post_init__(self) -> None:
        check_evaluation(self.temperature, self.rollouts)
        RunOptions.parse(
            concurrency=self.concurrency, timeout=self.timeout, max_completion_tokens=self.max_completion_tokens
        )
        if self.judge is not None:
            check_judge(self.judge)
        if self.trained_on is not None:  # they are read several times
            object.__setattr__(self, "trained_on", as_list(unpadded(self.trained_on), "trained_on"))
        if self.max_cost is not None:
            check_max_cost(self.max_cost)
        if self.run is not None:
            check_place("run", self.run)
        for name in ("gpu_price", "success_at"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and math.isfinite(value)):
                raise ConfigError(f"{name}: a finite number is needed, got {value!r}")
        if self.gpu_price is not None and self.gpu_price < 0:
            raise ConfigError(f"gpu_price: USD per hour of at least 0 are needed, got {self.gpu_price!r}")
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"output: {self.output} is a file; a folder is needed")
