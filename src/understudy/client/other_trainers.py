"""Arguments of other trainers' constructors, with the argument of this package that replaces them."""

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
    """Return the groups of a step, also from OpenPipe ART's argument `trajectory_groups`.

    Removes `trajectory_groups` and `verbose`, which has no effect here, from `options`. Raises ConfigError when the groups
    are passed twice or not at all.
    """
    options.pop("verbose", None)
    named = cast("Iterable[TrajectoryGroup] | None", options.pop("trajectory_groups", None))
    if groups is not None and named is not None:
        raise ConfigError("groups: give the groups once, as `groups` or as `trajectory_groups`")
    chosen = named if groups is None else groups
    if chosen is None:
        raise ConfigError("groups: a step needs a list of TrajectoryGroups")
    return chosen


def refuse_foreign(options: Mapping[str, object], known: Mapping[str, str], where: str) -> None:
    """Raise ConfigError for an argument of another trainer, naming the replacement from `known`."""
    for name in options:
        if name in known:
            raise ConfigError(f"{where} has no argument {name!r}: use {known[name]}")
