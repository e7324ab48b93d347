"""The options of a run: names, defaults, meanings and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict, Unpack, cast

from pydantic import TypeAdapter, ValidationError

from offbook.base.alerts import AlertLimits
from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.option_names import check_options
from offbook.base.types import PlaceName, Trajectory
from offbook.base.user_values import as_list
from offbook.client.rollouts.dataset import unpadded
from offbook.client.rollouts.sampling import MAX_COMPLETION_TOKENS
from offbook.contracts import Alert, Judge, TraceSink
from offbook.llms.ledger import check_max_cost

from .judging import check_judge
from .progress import TrainerProgress

RewardFunction = Callable[[object, Trajectory], object]
"""(scenario, trajectory) -> a number, a dict of numbers with the key `reward`, or a RewardResult; sync or async."""

Schedule = Callable[[int], TrainConfig]
"""The number of the next step, from 1 -> its options. Use it for a decaying learning rate, for example."""

AlertFunction = Callable[[Alert], object]
"""Called with an alert in the trainer's event loop; its return value is ignored."""

_PLACE: TypeAdapter[str] = TypeAdapter(PlaceName)

LEAST = {  # option -> its minimum
    "group_size": 2,
    "scenarios_per_step": 1,
    "concurrency": 1,
    "patience": 1,
    "eval_every": 0,
    "retries": 0,
    "max_completion_tokens": 1,
}


class TrainerOptions(TypedDict, total=False):
    """The options of a Trainer; their defaults and meanings are those of `RunOptions`."""

    reward: RewardFunction | None
    judge: Judge | None
    eval: Iterable[object] | None
    eval_every: int
    group_size: int
    scenarios_per_step: int
    concurrency: int
    timeout: float
    retries: int
    max_completion_tokens: int
    config: TrainConfig | Schedule
    patience: int
    target_reward: float
    max_cost: float | None
    seed: int
    run: str | None
    sinks: Sequence[str | TraceSink]
    alert_limits: AlertLimits
    on_alert: AlertFunction | None
    progress: TrainerProgress | None


@dataclass(frozen=True)
class RunOptions:
    """The validated options of a Trainer. Raises ConfigError for an invalid value."""

    reward: RewardFunction | None = None  # None: the rollout sets it
    judge: Judge | None = None  # scores every group after its rollouts
    eval: Iterable[object] | None = None  # scenarios for greedy evaluations before and after training
    eval_every: int = 0  # evaluate also after every `eval_every` steps; 0: only before and after
    group_size: int = 8  # rollouts per scenario
    scenarios_per_step: int = 4
    concurrency: int = 32  # rollouts that run at the same time
    timeout: float = 300.0  # seconds per rollout
    retries: int = 0  # repetitions of a failed rollout
    max_completion_tokens: int = MAX_COMPLETION_TOKENS  # per call, unless the agent sets a smaller limit
    config: TrainConfig | Schedule = field(default_factory=TrainConfig)  # the learner's options, or a schedule of them
    patience: int = 10  # the run stops after this many consecutive iterations without training
    target_reward: float = 1.0  # a run that stops so counts as solved if its mean reward is at least this
    max_cost: float | None = None  # budget for other LLMs (judges, for example) in USD; then the run ends
    seed: int = 0  # of the order of scenarios
    run: str | None = None  # the run's name in the server's lists; None: a new one per train() and evaluate()
    sinks: Sequence[str | TraceSink] = ()  # trace sinks: names such as "langfuse", or objects
    alert_limits: AlertLimits = field(default_factory=AlertLimits)  # limits of metrics that cause alerts
    on_alert: AlertFunction | None = None  # called with every alert
    progress: TrainerProgress | None = None  # None: a live table in a terminal, else plain lines

    @classmethod
    def parse(cls, **options: Unpack[TrainerOptions]) -> RunOptions:
        """The options. Raises ConfigError for an unknown option or an invalid value."""
        check_options("Trainer", options, [option.name for option in fields(cls)])
        return cls(**options)

    def __post_init__(self) -> None:
        for name, bound in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < bound:
                raise ConfigError(f"{name}: a whole number of at least {bound} is needed, got {value!r}")
        if not (is_number(self.timeout) and self.timeout > 0):
            raise ConfigError(f"timeout: seconds above 0 are needed, got {self.timeout!r}")
        if not (is_number(self.target_reward) and math.isfinite(self.target_reward)):
            raise ConfigError(f"target_reward: a finite number is needed, got {self.target_reward!r}")
        if self.max_cost is not None:
            check_max_cost(self.max_cost)
        if self.run is not None:
            check_place("run", self.run)
        if self.eval is not None:  # settings() counts them and the trainer runs them: a generator is read once
            object.__setattr__(self, "eval", as_list(unpadded(self.eval), "eval"))
        if self.eval_every and self.eval is None:
            raise ConfigError(f"eval_every={self.eval_every!r} needs scenarios to evaluate on: pass eval= too")
        if self.reward is not None and not callable(self.reward):
            raise ConfigError(
                f"reward: a function (scenario, trajectory) -> number is needed, got {type(self.reward).__name__} "
                f"{self.reward!r}"
            )
        if self.judge is not None:
            check_judge(self.judge)
        check_alerts(self.alert_limits, self.on_alert)
        check_config(self.config)

    def config_of(self, step: int) -> TrainConfig:
        """The learner's options for step number `step`. Raises ConfigError if a schedule returns no TrainConfig."""
        if isinstance(self.config, TrainConfig):
            return self.config
        config = self.config(step)
        if not isinstance(config, TrainConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise ConfigError(
                f"config: the function gave {type(config).__name__} {config!r:.200} for step {step}; it must return a "
                "TrainConfig"
            )
        return config


def check_alerts(limits: object, on_alert: object) -> None:
    """Raise ConfigError unless `limits` is an AlertLimits and `on_alert` is callable or None."""
    if on_alert is not None and not callable(on_alert):
        raise ConfigError(f"on_alert: a function of an Alert is needed, got {on_alert!r:.200}")
    if not isinstance(limits, AlertLimits):
        raise ConfigError(f"alert_limits: an AlertLimits is needed, got {limits!r:.200}")


def check_config(config: object) -> None:
    """Raise ConfigError unless `config` is a TrainConfig or callable; for a dict the message has the call to write."""
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
