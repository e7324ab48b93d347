"""The options of a run, each once: names, defaults, meanings and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict, Unpack

from pydantic import TypeAdapter, ValidationError

from understudy.alerts import AlertLimits
from understudy.client.sampling import MAX_COMPLETION_TOKENS
from understudy.config import TrainConfig
from understudy.contracts import Alert, Judge, TraceSink
from understudy.errors import ConfigError
from understudy.llms.ledger import check_max_cost
from understudy.types import PlaceName, Trajectory

from .judging import check_judge
from .progress import TrainerProgress

RewardFunction = Callable[[object, Trajectory], object]
"""(scenario, trajectory) -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async."""

Schedule = Callable[[int], TrainConfig]
"""The step about to be made, from 1 on -> its options: for a learning rate that falls, say."""

AlertFunction = Callable[[Alert], object]
"""Called with an alert in the trainer's event loop; what it returns is ignored."""

_PLACE: TypeAdapter[str] = TypeAdapter(PlaceName)

LEAST = {
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
    eval: Sequence[object] | None
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
    """How a run goes; each option once. Raises ConfigError."""

    reward: RewardFunction | None = None  # None: the rollout sets it
    judge: Judge | None = None  # scores each group after its rollouts
    eval: Sequence[object] | None = None  # scenarios that are run before and after, greedily
    eval_every: int = 0  # and after every so many steps; 0: not in between
    group_size: int = 8  # rollouts of one scenario, compared with each other
    scenarios_per_step: int = 4
    concurrency: int = 32  # rollouts at once
    timeout: float = 300.0  # seconds per rollout
    retries: int = 0  # how often a rollout that fails is run again
    max_completion_tokens: int = MAX_COMPLETION_TOKENS  # of one call, where the agent sets no smaller limit
    config: TrainConfig | Schedule = field(default_factory=TrainConfig)  # or what it is for each step
    patience: int = 10  # iterations in a row in which nothing was trained, after which the run stops
    target_reward: float = 1.0  # a run that stops so is solved when its mean reward has reached this
    max_cost: float | None = None  # USD for other LLMs (judges, say) in one run, which then ends; None: no limit
    seed: int = 0  # of the order of scenarios
    run: str | None = None  # the id that the server lists rollouts by; None: a new one for each train() and evaluate()
    sinks: Sequence[str | TraceSink] = ()  # where rollouts and steps are shown: names such as "langfuse", or objects
    alert_limits: AlertLimits = field(default_factory=AlertLimits)  # when a step alerts
    on_alert: AlertFunction | None = None  # is called with each alert
    progress: TrainerProgress | None = None  # None: a live table in a terminal, else plain lines

    @classmethod
    def parse(cls, **options: Unpack[TrainerOptions]) -> RunOptions:
        """The options as given; raises ConfigError also for a name that is none of them."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r}: beside `steps` there are {', '.join(known)}")
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
        if not isinstance(self.config, TrainConfig) and not callable(self.config):
            raise ConfigError(
                f"config: a TrainConfig, or a function from the step to one, is needed, got {self.config!r}"
            )

    def config_of(self, step: int) -> TrainConfig:
        """The learner's options for the step about to be made. Raises ConfigError for a function that gives no TrainConfig."""
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
    """Raise ConfigError for what cannot limit or take alerts."""
    if on_alert is not None and not callable(on_alert):
        raise ConfigError(f"on_alert: a function of an Alert is needed, got {on_alert!r:.200}")
    if not isinstance(limits, AlertLimits):
        raise ConfigError(f"alert_limits: an AlertLimits is needed, got {limits!r:.200}")


def check_place(name: str, value: object) -> None:
    """Raise ConfigError for what rollouts cannot be listed by."""
    try:
        _PLACE.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name}: 1 to 500 characters are needed, none of them NUL, got {value!r:.600}") from error


def is_number(value: object) -> bool:
    """Whether a user's value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)
