"""Arguments that other trainers' constructors take, and what says the same here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from ..errors import ConfigError
from ..types import TrajectoryGroup

BACKEND_OPTIONS = {
    "path": "dir=",
    "in_process": "nothing: the server is always a process of its own",
    "remote_server_url": "RemoteBackend(url)",
    "base_url": "RemoteBackend(url)",
    "engine_args": "single options such as max_model_len= or device=",
}
MODEL_OPTIONS = {
    "_internal_config": "lora=LoraOptions(r=..., alpha=...) for the adapter and LocalBackend(max_model_len=..., ...) for the engine",
    "entity": "project=",
    "base_path": "LocalBackend(dir=...)",
    "remote_server_url": "backend=RemoteBackend(url)",
    "report_metrics": "log(), and a trace sink",
}


NO_SFT = (
    "supervised fine-tuning is not in this version: train by reward with `model.train(groups)`, or fine-tune elsewhere and "
    "give the result as base_model="
)


def groups_of(groups: Iterable[TrajectoryGroup] | None, options: dict[str, object]) -> Iterable[TrajectoryGroup]:
    """The groups of a step, also under OpenPipe ART's name for them; takes what only ART knows out of the options.
    `verbose` asks for no more than is shown in any case. Raises ConfigError for groups under both names, or none."""
    options.pop("verbose", None)
    named = cast("Iterable[TrajectoryGroup] | None", options.pop("trajectory_groups", None))
    if groups is not None and named is not None:
        raise ConfigError("groups: give the groups once, as `groups` or as `trajectory_groups`")
    chosen = named if groups is None else groups
    if chosen is None:
        raise ConfigError("groups: a step needs a list of TrajectoryGroups")
    return chosen


def refuse_foreign(given: Mapping[str, object], known: Mapping[str, str], where: str) -> None:
    """Raise ConfigError for an argument of another trainer, naming ours."""
    for name in given:
        if name in known:
            raise ConfigError(f"{where} has no argument {name!r}: use {known[name]}")
