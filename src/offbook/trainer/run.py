"""The state of a training run: what is done, which updates are running, and whether new rollouts may start. `UpdateQueue` runs
the updates (train requests) in the background, one after the other, while the rollouts of the next steps run."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from offbook.base.config import TrainConfig
from offbook.base.numbers import distinct
from offbook.base.types import TrajectoryGroup
from offbook.client.rollouts.failures import FailureKind
from offbook.llms.ledger import Spending

from .evaluate import Evaluation, mean
from .imitation import Replay
from .models import ModelStep, StepOutcome
from .options import TrainerOptions
from .progress import Doing, TrainerProgress
from .report import Iteration, Stopped, verdict

Steps = Mapping[str, int]
"""Step by model name."""
Result = TypeVar("Result")
Item = TypeVar("Item")
Update = Callable[[], Awaitable[None]]
_NUMBER = re.compile(r"\d+([.,]\d+)*(e[-+]?\d+)?")


def run_name(what: Literal["train", "eval"], model: str) -> str:
    """A name for a run that people can read, such as `train-20261125-153045-email-agent-3f2a`, in local time. It is
    unique, and its first letters tell runs apart where a list is cut."""
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}-{model}-{secrets.token_hex(2)}"


def batch(scenarios: Sequence[Item], size: int, iteration: int, seed: int) -> list[Item]:
    """The scenarios of iteration 0, 1, ...: all of them in a shuffled order, then all in another one. A batch larger
    than the set is the whole set."""
    count = len(scenarios)
    size = min(size, count)
    picked: list[Item] = []
    taken: set[int] = set()
    place = iteration * size
    while len(picked) < size:
        epoch, offset = divmod(place, count)
        index = _order(count, epoch, seed)[offset]
        if index not in taken:  # a batch over the border of two epochs holds nothing twice
            taken.add(index)
            picked.append(scenarios[index])
        place += 1
    return picked


def _order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


@dataclass(frozen=True)
class RolloutBatch:
    """The scored rollouts of one iteration."""

    groups: list[TrajectoryGroup]
    first_began: Steps  # the models' steps when the first rollout started
    began: Mapping[str, Steps]  # by trajectory id: the models' steps when it started
    seconds: float  # wall time of the rollouts with their rewards
    spent: Mapping[str, float] = field(default_factory=dict[str, float])  # token and cost metrics of other LLMs

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ inside any group. If not, no model can learn; if so, a model almost surely does."""
        return any(len(distinct(_rewards(group))) > 1 for group in self.groups)

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return sum(len(group) for group in self.groups)

    def staleness(self, name: str, step: int) -> list[int]:
        """For every scored rollout, how many steps model `name` has made since it started, if it is trained at `step`.
        This is an upper bound for the age of its calls."""
        scored = [trajectory for group in self.groups for trajectory in group if trajectory.reward is not None]
        return [step - self.began.get(trajectory.id, self.first_began)[name] for trajectory in scored]


class Repeats:
    """The sentences that a run has said. Sentences that differ in their numbers alone are the same."""

    def __init__(self) -> None:
        self._sentences: dict[str, tuple[str, int]] = {}

    def new(self, sentence: str, *, shortened: bool = False) -> bool:
        """Whether it has to be said. `shortened`: a line that repeats it has a short form of it, so that it is not
        counted."""
        kind = _NUMBER.sub("#", sentence)
        new, (_, count) = kind not in self._sentences, self._sentences.get(kind, ("", 0))
        self._sentences[kind] = (sentence, count + (not shortened))
        return new

    def repeated(self) -> list[str]:
        """The sentences that hold for several iterations, with their number, as they were last."""
        return [f"in {count} iterations: {sentence}" for sentence, count in self._sentences.values() if count > 1]


@dataclass
class Run:
    """The state of one `atrain`.

    `steps`: the target; `started` and `current`: the models' steps at the start and now. `under_way`: batches whose
    update runs or waits, oldest first. When an update ends, `current` advances and its batch leaves `under_way`."""

    options: TrainerOptions
    steps: int
    started: Steps
    current: Steps
    progress: TrainerProgress
    id: str
    replay: Replay
    spending: Spending = field(default_factory=Spending)
    iterations: list[Iteration] = field(default_factory=list[Iteration])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    under_way: list[RolloutBatch] = field(default_factory=list[RolloutBatch])
    repeats: Repeats = field(default_factory=Repeats)
    _configs: dict[int, TrainConfig] = field(default_factory=dict[int, TrainConfig])
    _known_failures: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    _considered: int = 0  # the furthest model's step when an evaluation was last considered

    def __post_init__(self) -> None:
        self.doing = Doing(self.progress)
        self._considered = max(self.started.values())

    @property
    def number(self) -> int:
        """Number of the iteration whose rollouts start next, from 0 at the models' step 0."""
        return max(self.started.values()) + len(self.iterations) + len(self.under_way)

    def configs(self) -> dict[str, TrainConfig]:
        """The learner's options by model name, for models below the target step."""
        return {name: self.config_of(step + 1) for name, step in self.current.items() if step < self.steps}

    def config_of(self, step: int) -> TrainConfig:
        """The options for a step. A schedule is called once per step."""
        if step not in self._configs:
            self._configs[step] = self.options.config_of(step)
        return self._configs[step]

    def stopped(self) -> Stopped | None:
        """Why the run is over, or None. Call it only while no update is under way."""
        if all(step >= self.steps for step in self.current.values()):
            return Stopped.FINISHED
        target = self.options.target_reward
        measured = self.evaluations[-1].reward if self.evaluations else None
        learned = max(self.current.values()) > 0 or (measured is not None and measured >= target)
        return verdict(self.iterations, self.options.patience, target, learned=learned)

    def may_begin(self) -> bool:
        """Whether the next rollouts may start. They may if, for every outcome of the updates under way, they will be
        needed and their staleness will be allowed when they are trained."""
        waiting = len(self.under_way)
        if not waiting:
            return True
        learning = [step for step in self.current.values() if step < self.steps]
        if all(step + waiting >= self.steps for step in learning) or self._might_stop():
            return False
        return all(
            self._allowed_staleness(step + ahead + 1) >= ahead
            for step in learning
            for ahead in range(waiting + 1)
            if step + ahead < self.steps
        )

    def evaluation_due(self) -> bool:
        """Whether an intermediate evaluation is due: the furthest model has reached a new multiple of `eval_every`."""
        furthest, every = max(self.current.values()), self.options.eval_every
        advanced, self._considered = furthest > self._considered, furthest
        return bool(every) and advanced and furthest % every == 0

    def evaluation_ahead(self) -> bool:
        """Whether an update under way may reach a step that must be evaluated before the next update starts."""
        furthest, every = max(self.current.values()), self.options.eval_every
        return bool(every) and any((furthest + ahead) % every == 0 for ahead in range(1, len(self.under_way) + 1))

    def overlapped(self, batch: RolloutBatch, steps: Mapping[str, ModelStep]) -> dict[str, ModelStep]:
        """The models' steps with the staleness of their rollouts added. Call it before `applied`."""
        extended: dict[str, ModelStep] = {}
        for name, step in steps.items():
            ages = batch.staleness(name, self.current[name])
            metrics = {"staleness/mean": mean(ages), "staleness/max": float(max(ages))}
            requested = step.outcome in (StepOutcome.TRAINED, StepOutcome.NO_SIGNAL)
            extended[name] = replace(step, metrics=step.metrics | metrics) if requested else step
        return extended

    def applied(self, iteration: Iteration) -> None:
        """Record that the oldest update under way has ended."""
        self.under_way.pop(0)
        self.iterations.append(iteration)
        self.current = iteration.steps

    def new_failures(self, kinds: Sequence[FailureKind]) -> list[FailureKind]:
        """Those of `kinds` that are new in this run, and therefore shown with their tracebacks."""
        new = [kind for kind in kinds if kind.key not in self._known_failures]
        self._known_failures |= {kind.key for kind in kinds}
        return new

    def _allowed_staleness(self, step: int) -> int:
        config = self.config_of(step)
        return config.max_staleness if config.overlap else 0

    def _might_stop(self) -> bool:
        """Whether the updates under way could exhaust `patience` and so end the run, judging by their rewards."""
        learnt = [iteration.trained for iteration in self.iterations] + [batch.has_signal for batch in self.under_way]
        patience = self.options.patience
        ends = range(max(len(self.iterations), patience), len(learnt) + 1)
        return any(not any(learnt[end - patience : end]) for end in ends)


def _rewards(group: TrajectoryGroup) -> Sequence[float]:
    scored = [trajectory for trajectory in group if trajectory.exception is None]
    return [float(trajectory.reward) for trajectory in scored if trajectory.reward is not None]


class UpdateQueue:
    """A queue of updates. An update starts when the previous one has succeeded; after a failure no other starts."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def under_way(self) -> int:
        """Number of updates that run or wait."""
        return sum(not task.done() and not task.cancelling() for task in self._tasks)

    def add(self, update: Update) -> None:
        """Start the update after those added before."""
        self._tasks.append(asyncio.create_task(_after(self._tasks[-1] if self._tasks else None, update)))

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` while updates run, and return its result. If an update fails, cancel `work` and raise the update's
        error."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                self._take_ended()
            return working.result()
        finally:
            await _cancel([working])

    async def one_ended(self) -> None:
        """Wait until the running update ends. Raises its error."""
        await asyncio.wait(self._tasks[:1])
        self._take_ended()

    async def all_ended(self) -> None:
        """Wait until all updates have ended. Raises the error of the first that fails."""
        while self._tasks:
            await self.one_ended()

    async def settle(self, error: Exception) -> None:
        """Wait until all updates have ended, after `error`. If an update fails too, `error` gets a note about it."""
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception) and str(ended) != str(error):
                error.add_note(f"The update under way failed as well: {type(ended).__name__}: {ended}")

    async def cancel(self) -> None:
        """Cancel all updates and wait until they have ended."""
        await _cancel(self._tasks)

    def _take_ended(self) -> None:
        while self._tasks and self._tasks[0].done():
            ended = self._tasks.pop(0)
            if ended.cancelled() or ended.exception() is not None:
                for waiting in self._tasks:
                    waiting.cancel()
            ended.result()


async def announced(work: Coroutine[Any, Any, Result], cancelled: Callable[[], None]) -> Result:
    """The result of `work`. If it is cancelled, call `cancelled` at once, while `work` still ends."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working})
        return working.result()
    except asyncio.CancelledError:
        cancelled()
        raise
    finally:
        await _cancel([working])


async def _after(before: asyncio.Task[None] | None, update: Update) -> None:
    if before is not None:
        await asyncio.wait([before])
        if before.cancelled() or before.exception() is not None:
            raise asyncio.CancelledError
    await update()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
