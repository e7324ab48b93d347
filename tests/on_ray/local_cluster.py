"""A Ray cluster of this machine for tests, small."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

NICENESS = "RAY_worker_niceness"


@contextmanager
def ray_cluster(cpus: int) -> Iterator[Any]:
    """The module `ray`, connected. Its workers have the tests' own priority: Ray's 15 would starve them beside other tests."""
    ray: Any = import_module("ray")
    os.environ[NICENESS] = "0"
    try:
        with tempfile.TemporaryDirectory(prefix="ray") as folder:
            ray.init(
                num_cpus=cpus,
                object_store_memory=100_000_000,
                include_dashboard=False,
                _temp_dir=folder,
                logging_level="error",
            )
            yield ray
            ray.shutdown()
    finally:
        del os.environ[NICENESS]
