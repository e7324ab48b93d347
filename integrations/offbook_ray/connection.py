"""This process's connection to a Ray cluster, of which it has one at most."""

# pyright: reportUnknownMemberType=false
# ray's functions are partly typed.
from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from offbook.base.errors import BackendError, MissingExtraError

CONNECT_SECONDS = 10.0
IDLE_MILLISECONDS = 600_000
"""How long a worker of a cluster that starts here may be idle. Ray's own limit is a second for all but one worker a CPU:
those that wait for a step's update would start, and import everything, for the next rollouts."""
_connecting = threading.Lock()


def ray_module() -> Any:
    """Import ray, which takes seconds. Raises MissingExtraError."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error


def connect(address: str | None, *, option: str, runtime_env: Mapping[str, object] | None = None) -> None:
    """Connect this process unless it is connected already. Blocks for seconds: call it in a thread, where Ray also leaves
    the handlers of signals alone.

    `address`: Ray's, such as auto or local; None: the cluster that RAY_ADDRESS names or that runs on this machine, else a new
    one. `option` is for messages. Raises BackendError, MissingExtraError.
    """
    ray, address = ray_module(), address or os.environ.get("RAY_ADDRESS")
    with _connecting:
        if ray.is_initialized():
            return
        try:
            _check_answer(address)
            ray.init(
                address,
                runtime_env=None if runtime_env is None else dict(runtime_env),
                include_dashboard=False,
                logging_level=logging.WARNING,
                _system_config={"idle_worker_killing_time_threshold_ms": IDLE_MILLISECONDS}
                if address == "local"
                else None,
            )
        except Exception as error:  # ray raises a plain Exception where its processes do not come up in time
            raise BackendError(
                f"{option}: no Ray cluster at address={address!r} ({error}): start one with `ray start --head`; an "
                "address other than auto also needs its token (RAY_AUTH_MODE=token)"
            ) from error


def _check_answer(address: str | None) -> None:
    """Raise OSError if nothing listens at an address of the form HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
