"""The options of a comparison, each once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict, Unpack

from understudy.client.sampling import MAX_COMPLETION_TOKENS
from understudy.contracts import Judge, TraceSink
from understudy.errors import ConfigError
from understudy.llms.ledger import check_max_cost
from understudy.trainer.judging import check_judge
from understudy.trainer.options import RunOptions, check_place, is_number
from understudy.trainer.trainer import check_evaluation


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
    trained_on: Sequence[object] | None
    app_file: Path | None
    seed: int
    run: str | None
    sinks: Sequence[str | TraceSink]


@dataclass(frozen=True)
class CompareSettings:
    """How a comparison goes. Raises ConfigError."""

    baseline: str | None = None  # name of the candidate that the others are compared with; None: the first
    rollouts: int = 1  # per scenario and candidate
    temperature: float | None = 0.0  # of every call; None: as the app asks
    judge: Judge | None = None  # ranks the candidates' rollouts of a scenario; None: the app's own, where it has one
    success_at: float | None = None  # a rollout succeeds from this reward on; None: by the metric `success`
    concurrency: int = RunOptions.concurrency  # rollouts at once
    timeout: float = RunOptions.timeout  # seconds per rollout
    max_completion_tokens: int = MAX_COMPLETION_TOKENS  # of one call, where the app sets no smaller limit
    max_cost: float | None = None  # USD for other LLMs, candidates and judge; then the comparison ends
    gpu_price: float | None = None  # USD per hour of the machine that answers for trained steps; None: unknown
    output: Path = Path("comparison")  # folder of the report and of the rollouts
    fresh: bool = False  # run everything again, whatever the folder has
    trained_on: Sequence[object] | None = None  # training scenarios, checked against those compared on
    app_file: Path | None = None  # of the app: rollouts of another version of it are told
    seed: int = 0  # of shuffling and resampling
    run: str | None = None  # the id that the server lists rollouts by; None: one that follows from what is compared
    sinks: Sequence[str | TraceSink] = ()

    @classmethod
    def parse(cls, **options: Unpack[CompareOptions]) -> CompareSettings:
        """The options as given; raises ConfigError also for a name that is none of them."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"compare: there is no option {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        check_evaluation(self.temperature, self.rollouts)
        RunOptions.parse(
            concurrency=self.concurrency, timeout=self.timeout, max_completion_tokens=self.max_completion_tokens
        )
        if self.judge is not None:
            check_judge(self.judge)
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
