"""The operations behind the commands `offbook traces` and `offbook usage`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from offbook.base.config import default_dir
from offbook.base.errors import ConfigError
from offbook.base.wire import TrajectoryQuery
from offbook.client.commands import directory_rollouts, server_at
from offbook.contracts import TraceSink

from .export import export_run
from .names import resolve_sinks
from .reading import PAGE, pages
from .usage import TokenPrice, UsageRow, usage_rows

DAY = 86_400.0


def named_sinks(text: str, option: str) -> list[str | TraceSink]:
    """Split a comma-separated list of sink names. Raises ConfigError for an empty list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}: names of sinks are needed, such as langfuse,wandb; got {text!r}")
    return [*names]


def export_traces(run: str, to: str, url: str | None, folder: Path | None, say: Callable[[str], None]) -> None:
    """Deliver a run from the records of a server, or of a directory without one, to sinks. Raises ConfigError, ExportError."""
    sinks = resolve_sinks(named_sinks(to, "--to"))
    export_run(server_at(url, folder) or (folder or default_dir()), run, sinks, say=say)


def server_usage(
    url: str | None, folder: Path | None, query: TrajectoryQuery, days: float | None, now: float
) -> list[UsageRow]:
    """The usage from the records of a server, or of a directory without one, of the last `days` (None: all)."""
    since = 0.0 if days is None else now - days * DAY
    query = query.model_copy(update={"limit": PAGE})
    api = server_at(url, folder)
    rollouts = directory_rollouts(folder, query) if api is None else pages(api, query)
    return asyncio.run(usage_rows(rollouts, since))


def prices(texts: Sequence[str]) -> dict[str, TokenPrice]:
    """Parse prices such as `model=input/output`, in USD per million tokens. Raises ConfigError."""
    by_model: dict[str, TokenPrice] = {}
    for text in texts:
        model, equals, numbers = text.rpartition("=")
        first, slash, second = numbers.partition("/")
        try:
            if not (model and equals and slash):
                raise ValueError(text)
            by_model[model] = TokenPrice(float(first), float(second))
        except ValueError as error:
            raise ConfigError(
                f"--price: {text!r} is not of the form MODEL=INPUT/OUTPUT, such as agent=0.15/0.60"
            ) from error
    return by_model
