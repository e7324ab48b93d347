"""A Ray cluster as a server sees it: `serve --cluster ray`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from offbook.base.errors import MissingExtraError
from offbook.server.cluster import ClusterEngine

from .actor_process import RayPlacement
from .engine_actor import remote_engine
from .ray_learners import RayLearners
from .ray_sampler import RaySampler


class RayCluster:
    """Places engines in actors. `address`: auto (this machine's), local (start one), or Ray's; None: auto."""

    def __init__(self, address: str | None) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
        self._address = address or "auto"

    def __str__(self) -> str:
        return f"the Ray cluster {self._address}"

    def replica(self, engine: ClusterEngine, log: Path, *, name: str) -> RaySampler:
        """A replica of vLLM."""
        start = partial(remote_engine, engine.module, engine.base, engine.words, engine.gpu_words)
        return RaySampler(start, self._placement(engine), log, name=name)

    def learners(self, engine: ClusterEngine, count: int, log: Path) -> RayLearners:
        """Learners that compute each step with those of this machine."""
        return RayLearners(engine.base, self._placement(engine), count, engine.words, log)

    def _placement(self, engine: ClusterEngine) -> RayPlacement:
        return RayPlacement(self._address, engine.gpus, engine.cpus, engine.taken)
