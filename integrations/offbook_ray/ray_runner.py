"""Rollouts as tasks of a Ray cluster. The server records their calls, so a task returns little."""

# pyright: reportUnknownMemberType=false
# ray's functions are partly typed.
from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from offbook.base.errors import BackendError, ConfigError, MissingExtraError, RolloutError
from offbook.base.http_access import is_loopback
from offbook.base.option_names import names_checked
from offbook.base.redaction import error_text
from offbook.base.types import RecordedError, RolloutException, Trajectory, as_rollout_exception
from offbook.client.model import TrainableModel
from offbook.client.rollouts.capture import at_temperature, completion_limit, completions_limited, forced_temperature
from offbook.client.rollouts.gather import raise_common_fault
from offbook.contracts import RolloutState
from offbook.llms.ledger import SpendingTotals, budget, spending

CONNECT_SECONDS = 10.0
IDLE_MILLISECONDS = 600_000
"""How long a worker of a cluster that starts here may be idle. Ray's own limit is a second for all but one worker a CPU:
those that wait for a step's update would start, and import everything, for the next rollouts."""
_connecting = threading.Lock()

Rollout = Callable[[Any, Any], Awaitable[Trajectory]]


@dataclass(frozen=True)
class RemoteRollout:
    """What a worker needs for one rollout. `limit`: completion tokens. `folder`: the trainer's current one, in which
    the rollout
    runs too if the worker's machine has it; None: the worker's own."""

    rollout: Rollout
    model: Any
    scenario: Any
    temperature: float | None
    limit: int | None
    folder: str | None = None


@dataclass(frozen=True)
class RemoteResult:
    """What a worker returns: the rollout's return value, or why it failed; the costs of other LLMs, by purpose; and what a
    `RolloutState` collected. `fault`: an error that ends the run."""

    value: Any = None
    failed: RolloutException | None = None
    fault: Exception | None = None
    spent: Mapping[str, SpendingTotals] = field(default_factory=dict[str, SpendingTotals])
    collected: Any = None


class RayRunner:
    """Runs a Trainer's rollouts as Ray tasks. If a worker dies, Ray repeats its rollouts, and only those.

    `address`: the Ray cluster's address. None joins the cluster of RAY_ADDRESS or the one on this machine, or else
    starts one here.
    `num_cpus`, `num_gpus`, `resources`: what one rollout reserves. `max_retries`: how often a rollout is run again after its
    worker died; -1: without limit. `runtime_env`: Ray's, such as {"working_dir": "."}, for workers on other machines.
    The rollout is pickled, so pass a graph as a function that builds it. Raises MissingExtraError, ConfigError.
    """

    @names_checked("RayRunner")
    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        max_retries: int = 3,
        runtime_env: Mapping[str, object] | None = None,
    ) -> None:
        self.address = address
        self._runtime_env = runtime_env
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_retries": max_retries}
        options |= {"resources": dict(resources)} if resources else {}
        self._ray = ray_module()
        try:
            self._task: Any = self._ray.remote(**options)(run_payload)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"RayRunner: {error}") from error
        self._wanted = {"CPU": float(num_cpus), "GPU": float(num_gpus), **(resources or {})}

    async def slots(self) -> int:
        """Connect, and return how many rollouts the cluster can run at once. Raises BackendError, and ConfigError for
        rollouts that need more than the cluster has."""
        await asyncio.to_thread(self._connect)
        have = self._ray.cluster_resources()
        fits = {name: int(have.get(name, 0) / amount) for name, amount in self._wanted.items() if amount}
        short = sorted(name for name, count in fits.items() if count < 1)
        if short:
            name = short[0]
            raise ConfigError(
                f"RayRunner: a rollout reserves {self._wanted[name]:g} {name}, and the cluster has {have.get(name, 0):g}: "
                "lower it, or add a node"
            )
        return min(fits.values(), default=1000)

    async def run(self, rollout: Rollout, model: Any, scenario: Any) -> Trajectory:
        """Run one rollout on the cluster. Raises what the rollout raised: RecordedError, or an error that ends the run."""
        if await asyncio.to_thread(self._connect) > 1:
            check_reachable(model)
        folder = None if "working_dir" in (self._runtime_env or {}) else str(Path.cwd())
        payload = pickled(RemoteRollout(rollout, model, scenario, forced_temperature(), completion_limit(), folder))
        task = self._task.remote(payload)
        try:
            result: RemoteResult = _cloudpickle().loads(await asyncio.wrap_future(task.future()))
        except asyncio.CancelledError:
            self._ray.cancel(task)
            raise
        if isinstance(rollout, RolloutState):
            rollout.collect(result.collected)
        for purpose, totals in result.spent.items():
            spending().record(purpose, totals)
            async with spending().reserved(0.0) as request:
                request.charge(totals.cost)
        if result.fault is not None:
            raise result.fault
        if result.failed is not None:
            raise RecordedError(result.failed)
        return result.value

    def _connect(self) -> int:
        """Connect unless this process is connected already. Returns the number of machines."""
        connect(self.address, self._runtime_env)
        return sum(node["Alive"] for node in self._ray.nodes())

    def __repr__(self) -> str:
        return f"RayRunner({self.address!r})"


def run_payload(payload: bytes) -> bytes:
    """The task: run one pickled RemoteRollout to its end, and return its pickled RemoteResult."""
    result = asyncio.run(remote_result(payload))
    try:
        return _cloudpickle().dumps(result)
    except Exception as error:  # noqa: BLE001  # the user's values; a bad rollout is data
        failed = RolloutError(f"what the rollout returned cannot be pickled: {error_text(error)}")
        failed.__cause__ = error
        return _cloudpickle().dumps(RemoteResult(failed=as_rollout_exception(failed), spent=result.spent))


async def remote_result(payload: bytes) -> RemoteResult:
    """Run one rollout in a worker. What it raises is part of the result."""
    try:
        job: RemoteRollout = _cloudpickle().loads(payload)
    except Exception as error:  # noqa: BLE001  # the user's modules, which this machine may lack
        failed = RolloutError(
            f"the worker cannot load the rollout ({error_text(error)}): install its modules there, or pass "
            'RayRunner(runtime_env={"working_dir": "."})'
        )
        failed.__cause__ = error
        return RemoteResult(fault=failed)
    if job.folder is not None and Path(job.folder).is_dir():
        os.chdir(job.folder)  # a worker runs one rollout at a time
    limit = nullcontext() if job.limit is None else completions_limited(job.limit)
    with budget() as spent, at_temperature(job.temperature), limit:
        value, outcome = None, partial(RemoteResult)
        try:
            value = await job.rollout(job.model, job.scenario)
        except Exception as error:  # noqa: BLE001  # a bad rollout is data, not a crash
            outcome = partial(failed_result, error)
    collected = job.rollout.collected() if isinstance(job.rollout, RolloutState) else None
    return outcome(value=value, spent=spent.by_purpose(), collected=collected)


def failed_result(error: Exception, **rest: Any) -> RemoteResult:
    """The result of a rollout that raised."""
    try:
        raise_common_fault(error)
    except Exception as fault:  # noqa: BLE001  # CaptureError or BudgetExceeded: the trainer's process raises it
        return RemoteResult(fault=fault, **rest)
    return RemoteResult(failed=as_rollout_exception(error), **rest)


def pickled(job: RemoteRollout) -> bytes:
    """Raises ConfigError, with what to do, for a rollout that cannot be pickled."""
    try:
        return _cloudpickle().dumps(job)
    except Exception as error:  # any object's own pickling
        raise ConfigError(
            f"runner: the rollout cannot be sent to a worker ({error}): it, its scenarios and what they refer to must be "
            "picklable. Give `trainable` a function that builds the graph, and create clients and connections inside"
        ) from error


def check_reachable(model: Any) -> None:
    """Raise ConfigError if the models' server listens on this machine alone."""
    models = cast(tuple[TrainableModel, ...], model if isinstance(model, tuple) else (model,))
    for one in models:
        host = urlsplit(one.inference_base_url).hostname or ""
        if is_loopback(host):
            raise ConfigError(
                f"RayRunner: model {one.name!r} is on {host}, which the cluster's other machines cannot reach: start "
                "`offbook serve --host 0.0.0.0` and use RemoteBackend with the address of its machine"
            )


def ray_module() -> Any:
    """Import ray, which takes seconds. Raises MissingExtraError."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error


def connect(address: str | None, runtime_env: Mapping[str, object] | None = None) -> None:
    """Connect this process unless it is connected already. Blocks for seconds: call it in a thread, where Ray also leaves
    the handlers of signals alone.

    `address`: Ray's, such as auto or local; None: the cluster that RAY_ADDRESS names or that runs on this machine, else a new
    one. Raises BackendError, MissingExtraError.
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
                f"RayRunner: no Ray cluster at address={address!r} ({error}): start one with `ray start --head`; an "
                "address other than auto also needs its token (RAY_AUTH_MODE=token)"
            ) from error


def _check_answer(address: str | None) -> None:
    """Raise OSError if nothing listens at an address of the form HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def _cloudpickle() -> Any:
    return ray_module().cloudpickle
