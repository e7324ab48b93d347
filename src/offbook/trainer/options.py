"""The options of a run: names, defaults, meanings and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import TypeAdapter, ValidationError

from offbook import plugins
from offbook.base.alerts import AlertLimits
from offbook.base.config import MAX_TEMPERATURE, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.options import Headline, RunOptions, option
from offbook.base.types import PlaceName, Trajectory
from offbook.base.user_values import as_list
from offbook.client.rollouts.capture import MAX_COMPLETION_TOKENS
from offbook.client.rollouts.dataset import unpadded
from offbook.contracts import Judge, RolloutRunner, TraceSink
from offbook.llms.ledger import check_max_cost

from .judging import check_judge
from .progress import TrainerProgress

RewardFunction = Callable[[object, Trajectory], object]
"""(scenario, trajectory) -> a number, a dict of numbers with the key `reward`, or a RewardResult; sync or async."""

Schedule = Callable[[int], TrainConfig]
"""The number of the next step, from 1 -> its options. Use it for a decaying learning rate, for example."""

_PLACE: TypeAdapter[str] = TypeAdapter(PlaceName)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(RunOptions):
    """The options that trainings, evaluations and comparisons share. Raises ConfigError for an invalid value."""

    heading = "Rollouts"

    judge: Judge | None = option(None, "scores each group when its rollouts have ended")
    concurrency: int = option(32, "rollouts that run at the same time", least=1, shown_default="32, or the app's limit")
    timeout: float = option(300.0, "time limit of each rollout, in seconds")
    max_completion_tokens: int = option(
        MAX_COMPLETION_TOKENS,
        "limit of each answer, in tokens; a smaller limit of the app stays",
        least=1,
        shown_default=f"the app's own, or {MAX_COMPLETION_TOKENS:,}",
    )
    max_cost: float | None = option(
        None, "limit for other LLMs such as judges, in USD; the run ends when it is reached"
    )
    run: str | None = option(None, "name of the run in the server's lists", shown_default="a new one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.timeout) and self.timeout > 0):
            raise ConfigError(f"timeout: seconds above 0 are needed, got {self.timeout!r}")
        if self.max_cost is not None:
            check_max_cost(self.max_cost)
        if self.run is not None:
            check_place("run", self.run)
        if self.judge is not None:
            check_judge(self.judge)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(RolloutOptions):
    """The options of a Trainer. Raises ConfigError for an invalid value."""

    heading = "Training"

    reward: RewardFunction | None = option(
        None, "function (scenario, trajectory) -> reward; None: the rollout sets the reward"
    )
    eval: Iterable[object] | None = option(None, "scenarios to evaluate on, greedily, before and after training")
    eval_every: int = option(0, "steps between evaluations; 0: only before and after training", least=0)
    group_size: Headline[int] = option(8, "rollouts per scenario", least=2)
    scenarios_per_step: Headline[int] = option(4, "scenarios per step", least=1)
    retries: int = option(0, "how often a failed rollout is repeated", least=0)
    config: TrainConfig | Schedule = option(
        TrainConfig(), "options of the learner, or a function from the step to them"
    )
    replayed: int = option(
        48, "rollouts of earlier steps that a step with min_reward= imitates beside its own", least=0
    )
    patience: int = option(10, "stop after this many iterations in a row without an update", least=1)
    target_reward: float = option(1.0, "mean reward from which a run that `patience` stops counts as solved")
    sinks: Sequence[str | TraceSink] = option((), "trace sinks: names such as langfuse, or objects")
    keep_checkpoints: int | None = option(
        None, "checkpoints to keep: the newest ones, and the best by `val/reward` (None: all)", least=1
    )
    seed: int = option(0, "random seed for the order of the scenarios")
    alert_limits: AlertLimits = option(AlertLimits(), "metric limits that cause alerts")
    runner: str | RolloutRunner | None = option(
        None, "runs the rollouts elsewhere: a name such as ray, or an object; None: in this process"
    )
    progress: TrainerProgress | None = option(None, "how progress is shown; None: one line per step")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.target_reward) and math.isfinite(self.target_reward)):
            raise ConfigError(f"target_reward: a finite number is needed, got {self.target_reward!r}")
        if self.eval is not None:  # settings() counts them and the trainer runs them: a generator is read once
            object.__setattr__(self, "eval", as_list(unpadded(self.eval), "eval"))
        self.check_evaluations()
        if self.reward is not None and not callable(self.reward):
            raise ConfigError(
                f"reward: a function (scenario, trajectory) -> number is needed, got {type(self.reward).__name__} "
                f"{self.reward!r}"
            )
        if not isinstance(self.alert_limits, AlertLimits):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"alert_limits: an AlertLimits is needed, got {self.alert_limits!r:.200}")
        check_config(self.config)

    def check_evaluations(self) -> None:
        """Raise ConfigError for evaluations that have no scenarios."""
        if self.eval_every and self.eval is None:
            raise ConfigError(f"eval_every={self.eval_every!r} needs scenarios to evaluate on: pass eval= too")

    def config_of(self, step: int) -> TrainConfig:
        """The learner's options for step number `step`. Raises ConfigError if a schedule returns no TrainConfig, or one
        whose loss does not read rewards."""
        if isinstance(self.config, TrainConfig):
            return self.config
        config = self.config(step)
        if not isinstance(config, TrainConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise ConfigError(
                f"config: the function gave {type(config).__name__} {config!r:.200} for step {step}; it must return a "
                "TrainConfig"
            )
        check_config(config)
        return config


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainerOptions):
    """The options for training a wrapped app."""

    steps: Headline[int] = option(50, "total number of steps; a second run continues where the first ended", least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TrainerOptions):
    """The options for evaluating a wrapped app."""

    heading = "Evaluation"

    temperature: float | None = option(0.0, "sampling temperature; 0 is greedy", least=0, most=MAX_TEMPERATURE)
    rollouts: Headline[int] = option(1, "rollouts per scenario", least=1)


def load_runner(runner: str | RolloutRunner | None) -> RolloutRunner | None:
    """The runner of a name: an entry point of the group `offbook.runners`, a callable without arguments. Raises ConfigError for an
    unknown name, MissingExtraError for a package that is not installed."""
    if not isinstance(runner, str):
        return runner
    return cast(Callable[[], RolloutRunner], plugins.load("offbook.runners", runner))()


def check_config(config: object) -> None:
    """Raise ConfigError unless `config` is a TrainConfig or callable; for a dict the message has the call to write. Also
    raises it for a loss that would imitate bad rollouts as well as good ones."""
    if isinstance(config, TrainConfig) and config.supervised and not config.imitates_the_good:
        raise ConfigError(
            f"loss={config.loss!r} ignores rewards, and a Trainer's rollouts are both good and bad: set min_reward= "
            "to imitate the good ones, or choose another loss"
        )
    if isinstance(config, TrainConfig) or callable(config):
        return
    hint = ""
    if isinstance(config, dict):
        options = cast("dict[str, object]", config)
        TrainConfig.parse(**options)  # an unknown or invalid option comes first
        hint = f": write config=TrainConfig({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    raise ConfigError(f"config: a TrainConfig, or a function from the step to one, is needed, got {config!r}{hint}")


def check_evaluation(temperature: float | None, rollouts: int) -> None:
    """Raise ConfigError for an invalid temperature or number of rollouts."""
    if temperature is not None and not (is_number(temperature) and 0 <= temperature < math.inf):
        raise ConfigError(f"temperature: 0 (greedy), a finite number above, or None is needed, got {temperature!r}")
    if not isinstance(rollouts, int) or rollouts < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise ConfigError(f"rollouts: a whole number of at least 1 is needed, got {rollouts!r}")


def check_place(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is a valid name of a run, group or scenario; see `PlaceName`."""
    try:
        _PLACE.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name}: 1 to 500 characters are needed, none of them NUL, got {value!r:.600}") from error


def is_number(value: object) -> bool:
    """Whether a user's value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)
