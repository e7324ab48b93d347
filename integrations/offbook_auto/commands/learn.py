"""The command `offbook learn`."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError, OffbookError
from offbook.base.terminal import echo
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.option_values import model_option
from offbook.commands.options import ImitationOptions, ModelOptions, Target
from offbook.trainer.trainable_target import load_target
from offbook_auto.app_source import WrappedApp
from offbook_auto.learn import Learning, LearnOptions

NIGHTLY = "03:00"
Schedule = Annotated[
    str, typer.Option(help="when to learn: none (once, now), nightly (at 03:00), or daily at a time such as 23:30")
]


@with_options(LearnOptions, TrainConfig, ImitationOptions, ModelOptions)
def learn(
    target: Target,
    schedule: Schedule = "none",
    *,
    options: dict[str, Any],
) -> None:
    """Continue training on an app's newest traffic, and promote a step only if it does better.

    A fork of the model imitates the recorded threads with good rewards, and learns from the rewards of its own answers.
    The app then answers held-out questions with the old and the new step. If Ctrl-C or a crash ends a round, the same
    command continues it.

    \b
    Example:
      offbook learn my_app:agent --route order-desk --min-reward 1 --schedule nightly
    """
    moment = None if schedule == "none" else time_of_day(NIGHTLY if schedule == "nightly" else schedule)
    app = load_target(target)
    if not isinstance(app, WrappedApp):
        raise ConfigError(f"target: what offbook_langgraph.trainable(...) returned is needed, got {app!r:.200}")
    models = app.own_models()
    trained = model_option(options).get("model") or (models[0] if len(models) == 1 else None)
    if trained is None:
        raise ConfigError(
            "target: exactly one model can be trained: pass trainable(model=...), or --model and --base-model"
        )
    sft = ImitationOptions(**options_of(ImitationOptions, options)).config()
    step = {name: value for name, value in options_of(TrainConfig, options).items() if name != "min_reward"}
    rl = TrainConfig.parse(**step)
    learning = Learning(app, trained, LearnOptions(**options_of(LearnOptions, options), sft=sft, rl=rl))
    with learning.held():
        if moment is None:
            asyncio.run(learning.once())
        else:
            _learn_daily(learning, moment)


def _learn_daily(learning: Learning, moment: str) -> None:
    while True:
        seconds = seconds_until(moment, datetime.now())
        echo(f"next round at {moment}, in {seconds / 3600:.1f} h")
        time.sleep(seconds)
        try:
            asyncio.run(learning.once())
        except OffbookError as error:  # the next night tries again
            echo(f"offbook: {error}", err=True)


def time_of_day(text: str) -> str:
    """A time of day, as HH:MM. Raises ConfigError."""
    if re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text) is None:
        raise ConfigError(f"--schedule {text!r}: none, nightly, or a time such as 23:30 is needed")
    return text


def seconds_until(moment: str, now: datetime) -> float:
    """Seconds from `now` to the next time of day `moment`, by the clock of this machine.

    >>> seconds_until("03:00", datetime(2026, 1, 1, 2, 0)), seconds_until("03:00", datetime(2026, 1, 1, 3, 0))
    (3600.0, 86400.0)
    """
    hour, minute = map(int, moment.split(":"))
    next_time = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if next_time <= now:
        next_time += timedelta(days=1)
    return (next_time - now).total_seconds()
