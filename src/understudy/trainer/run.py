"""A run of the trainer: what it has done, what is under way, and what may begin beside that."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from understudy.client.failures import FailureKind
from understudy.config import TrainConfig
from understudy.llms.ledger import Spending
from understudy.types import TrajectoryGroup

from .evaluate import Evaluation, mean
from .models import ModelStep, StepOutcome
from .options import RunOptions
from .progress import Doing, TrainerProgress
from .report import Iteration, Stopped, verdict

Steps = Mapping[str, int]
"""The step of each model, by name."""


@dataclass(frozen=True)
class RolloutBatch:
    """The scored rollouts of one iteration. `began` has the steps with which each began, by trajectory id, and
    `first_began` those of the first."""

    groups: list[TrajectoryGroup]
    first_began: Steps
    began: Mapping[str, Steps]
    seconds: float
    waited: float  # seconds, for an update, before they could begin
    spent: Mapping[str, float] = field(default_factory=dict[str, float])  # metrics of other LLMs that were asked

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ inside a group. Without that, no model learns anything; with it, almost surely."""
        return any(len(set(_rewards(group))) > 1 for group in self.groups)

    @property
    def rollouts(self) -> int:
        return sum(len(group) for group in self.groups)

    def staleness(self, name: str, step: int) -> list[int]:
        """How many steps this model had made since each scored rollout began, when it is trained at `step`. No call of the
        rollout is older."""
        scored = [each for group in self.groups for each in group if each.reward is not None]
        return [step - self.began.get(each.id, self.first_began)[name] for each in scored]


class Stopwatch:
    """Seconds for which something has run, also while it still does."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    def taken(self) -> float:
        """The seconds since it was last taken."""
        seconds, self._seconds = self.seconds, 0.0
        return seconds

    @contextmanager
    def running(self) -> Generator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._seconds, self._since = self.seconds, None


@dataclass
class Run:
    """The state of one `atrain`. `at` changes when an update has ended, and with it `under_way`, in order of training."""

    options: RunOptions
    steps: int
    started: Steps
    at: Steps
    progress: TrainerProgress
    id: str
    spending: Spending = field(default_factory=Spending)
    iterations: list[Iteration] = field(default_factory=list[Iteration])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    under_way: list[RolloutBatch] = field(default_factory=list[RolloutBatch])
    rolling: Stopwatch = field(default_factory=Stopwatch)
    waiting: Stopwatch = field(default_factory=Stopwatch)
    _configs: dict[int, TrainConfig] = field(default_factory=dict[int, TrainConfig])
    _known_failures: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    _considered: int = 0  # the furthest model's step when an evaluation was last considered

    def __post_init__(self) -> None:
        self.doing = Doing(self.progress)
        self._considered = max(self.started.values())

    @property
    def number(self) -> int:
        """Of the iteration whose rollouts begin next."""
        return max(self.started.values()) + len(self.iterations) + len(self.under_way)

    def configs(self) -> dict[str, TrainConfig]:
        """The learner's options for each model that has not made its steps."""
        return {name: self.config_of(step + 1) for name, step in self.at.items() if step < self.steps}

    def config_of(self, step: int) -> TrainConfig:
        """The options for a step; a schedule is asked once for each."""
        if step not in self._configs:
            self._configs[step] = self.options.config_of(step)
        return self._configs[step]

    def stopped(self) -> Stopped | None:
        """Whether the run is over. To be asked while nothing is under way."""
        if all(step >= self.steps for step in self.at.values()):
            return Stopped.FINISHED
        return verdict(self.iterations, self.options.patience, self.options.target_reward)

    def may_begin(self) -> bool:
        """Whether rollouts may begin now: whatever comes of the updates under way, these will be needed and no staler
        than allowed when they are trained."""
        waiting = len(self.under_way)
        if not waiting:
            return True
        learning = [step for step in self.at.values() if step < self.steps]
        if all(step + waiting >= self.steps for step in learning) or self._might_stop():
            return False
        return all(
            self._allowed_staleness(step + made + 1) >= made
            for step in learning
            for made in range(waiting + 1)
            if step + made < self.steps
        )

    def evaluation_due(self) -> bool:
        """Whether an evaluation in between is: the furthest model has made `eval_every` steps more."""
        ahead, every = max(self.at.values()), self.options.eval_every
        further, self._considered = ahead > self._considered, ahead
        return bool(every) and further and ahead % every == 0

    def evaluation_ahead(self) -> bool:
        """Whether an update under way may lead to a step that is to be evaluated: the next must wait for that."""
        ahead, every = max(self.at.values()), self.options.eval_every
        return bool(every) and any((ahead + made) % every == 0 for made in range(1, len(self.under_way) + 1))

    def overlapped(self, batch: RolloutBatch, made: Mapping[str, ModelStep], beside: float) -> dict[str, ModelStep]:
        """What was done for each model, with the metrics of the overlap. `beside`: seconds of the update in which rollouts
        of later steps ran. To be asked before `at` moves on."""
        found: dict[str, ModelStep] = {}
        for name, step in made.items():
            ages = batch.staleness(name, self.at[name])
            metrics = {
                "staleness/mean": mean(ages),
                "staleness/max": float(max(ages)),
                "overlap/seconds": beside,
                "overlap/waited_seconds": batch.waited,
            }
            asked = step.outcome in (StepOutcome.TRAINED, StepOutcome.NO_SIGNAL)
            found[name] = replace(step, metrics=step.metrics | metrics) if asked else step
        return found

    def applied(self, iteration: Iteration) -> None:
        """The oldest update under way has ended."""
        self.under_way.pop(0)
        self.iterations.append(iteration)
        self.at = iteration.steps

    def new_failures(self, kinds: Sequence[FailureKind]) -> list[FailureKind]:
        """Those that were not seen before in this run: their tracebacks are shown once."""
        new = [kind for kind in kinds if kind.key not in self._known_failures]
        self._known_failures |= {kind.key for kind in kinds}
        return new

    def _allowed_staleness(self, step: int) -> int:
        config = self.config_of(step)
        return config.max_staleness if config.overlap else 0

    def _might_stop(self) -> bool:
        """Whether the updates under way, by the rewards they train on, may end the run."""
        learnt = [each.trained for each in self.iterations] + [batch.has_signal for batch in self.under_way]
        patience = self.options.patience
        ends = range(max(len(self.iterations), patience), len(learnt) + 1)
        return any(not any(learnt[end - patience : end]) for end in ends)


def _rewards(group: TrajectoryGroup) -> Sequence[float]:
    return [float(each.reward) for each in group if each.reward is not None and each.exception is None]
