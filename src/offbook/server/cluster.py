"""Engines on the machines of a cluster: what a plug-in of the group `offbook.clusters` does for a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from offbook import plugins

from .base_model import BaseModelPath
from .sampler.supervised import SupervisedSampler


@dataclass(frozen=True)
class ClusterEngine:
    """An engine to run elsewhere: Python's module, its base, and the words of its command line, in which the machine replaces
    {base}, {host}, {port}, {pid} and {gpus}. `gpu_words` are added where it has GPUs. `cpus`, `gpus`: what it reserves.
    `taken`: GPUs of this machine that the server uses, by nvidia-smi's index."""

    module: str
    base: BaseModelPath
    words: tuple[str, ...]
    gpu_words: tuple[str, ...] = ()
    gpus: int = 0
    cpus: float = 1
    taken: frozenset[int] = frozenset()


class ClusterLearners(Protocol):
    """The learners of a team that are on machines of a cluster. `key`: what all learners of the team must have; new with each
    start."""

    key: str

    async def start(self, first: int) -> list[str]:
        """Place the learners `first`, `first` + 1, ..., and return where they listen for the first. Raises EngineError."""
        ...

    async def lost(self) -> str:
        """Wait until one of them has ended; returns which and how."""
        ...

    def kill(self) -> None:
        """Kill them without waiting."""
        ...

    async def stop(self, deadline: float) -> None:
        """End them, at the latest after `deadline` seconds."""
        ...


class Cluster(Protocol):
    """A cluster at an address. `str(cluster)` names it in messages."""

    def __init__(self, address: str | None) -> None:
        """`address`: as its users write it; None: the cluster's own default. Raises ConfigError, MissingExtraError."""
        ...

    def replica(self, engine: ClusterEngine, log: Path, *, name: str) -> SupervisedSampler:
        """A replica of the sampler. `log`: the file here to which its output is copied."""
        ...

    def learners(self, engine: ClusterEngine, count: int, log: Path) -> ClusterLearners:
        """`count` learners. `log`: the first learner's, beside which theirs are copied."""
        ...


def cluster_of(text: str) -> Cluster:
    """The cluster of `--cluster NAME` or `NAME:ADDRESS`. Raises ConfigError, MissingExtraError."""
    name, _, address = text.partition(":")
    plugin = plugins.load_class("offbook.clusters", name, object)
    return cast("type[Cluster]", plugin)(address or None)
