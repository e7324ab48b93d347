"""Finds state that two rollouts share by mistake: a thread of a checkpointer, or a namespace of a store."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import finalize

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore, GetOp, PutOp, SearchOp
from langgraph.store.base.batch import AsyncBatchedBaseStore

from offbook.base.errors import SharedStateError

from .active_capture import ActiveCapture, active

Place = tuple[str, ...]
"""`("thread", id)` of a checkpointer, or `("store", *namespace)`."""
Wrap = Callable[[type[Any], tuple[str, ...], Callable[[str, Callable[..., Any]], Callable[..., Any]]], None]

SAVER_READS = ("get_tuple", "aget_tuple")
SAVER_WRITES = ("put", "aput", "put_writes", "aput_writes")
STORE_READS = ("get", "aget", "search", "asearch")
STORE_WRITES = ("put", "aput", "delete", "adelete")
STORE_BATCHES = ("batch", "abatch")

_lock = threading.Lock()
_writers: dict[int, dict[Place, tuple[str, ...]]] = {}
"""`id()` of a checkpointer or store -> place -> up to two trajectories that wrote there. `id()` is used since some of these
objects are not hashable, or equal others. Every prefix of a namespace is an entry too, with BENEATH appended."""
BENEATH = "..."


def watch(wrap: Wrap) -> None:
    """Wrap the read and write methods of all existing checkpointer and store classes."""
    wrap(BaseCheckpointSaver, SAVER_READS + SAVER_WRITES, _saver_method)
    wrap(BaseStore, STORE_READS + STORE_WRITES + STORE_BATCHES, _store_method)


def touch(owner: Any, place: Place, *, writes: bool, below: bool = False) -> None:
    """Note that the current rollout reads or writes a place; `below` includes everything beneath it.

    Raises SharedStateError if another rollout has written there.
    """
    capture = active()
    if capture is None or capture.ended or capture.trajectory_id is None or capture.shared_state == "allow":
        return
    mine = capture.trajectory_id
    with _lock:
        written = _written_in(owner)
        before = written.get((*place, BENEATH) if below else place, ())
        if writes:
            for noted in (place, *((*place[:end], BENEATH) for end in range(1, len(place) + 1))):
                known = written.get(noted, ())
                if len(known) < 2 and mine not in known:
                    written[noted] = (*known, mine)
    other = next((trajectory_id for trajectory_id in before if trajectory_id != mine), None)
    if other is not None:
        _raise_shared(capture, owner, place, other)


def _written_in(owner: Any) -> dict[Place, tuple[str, ...]]:
    known = _writers.get(id(owner))
    if known is None:
        known = _writers[id(owner)] = {}
        if getattr(cast(object, type(owner)), "__weakrefoffset__", 0):
            finalize(owner, _writers.pop, id(owner), None)
    return known


def _raise_shared(capture: ActiveCapture, owner: Any, place: Place, other: str) -> None:
    kind, *names = place
    what = f"the thread {names[0]!r}" if kind == "thread" else f"the store namespace {tuple(names)!r}"
    use = "thread_id" if kind == "thread" else "part of the namespace"
    error = SharedStateError(
        f"two rollouts used {what} of {type(owner).__name__}: {other} wrote there before {capture.trajectory_id}, so one "
        f"rollout would influence the other. Use (offbook.current_trajectory() or offbook.Trajectory()).id as {use}, or give "
        "trainable() a factory, a function that creates graph, checkpointer and store for each rollout, or accept it with "
        'shared_state="allow"'
    )
    capture.faults.append(error)
    raise error


def _saver_method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    writes = name in SAVER_WRITES

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is not None:
            config: RunnableConfig = args[0] if args else kwargs.get("config") or {}
            thread: object = (config.get("configurable") or {}).get("thread_id")
            if thread is not None:
                touch(self, ("thread", str(thread)), writes=writes)
        return original(self, *args, **kwargs)

    return method


def _store_method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    writes, below = name in STORE_WRITES, name in ("search", "asearch")

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is not None:
            namespace: object = args[0] if args else kwargs.get("namespace")
            if isinstance(namespace, tuple):
                touch(self, ("store", *cast(Place, namespace)), writes=writes, below=below)
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    def batch(self: Any, ops: Iterable[Any]) -> Any:
        # The own task of an AsyncBatchedBaseStore passes on operations that its methods have noted already.
        if active() is None or isinstance(self, AsyncBatchedBaseStore):
            return original(self, ops)
        operations = list(ops)
        _touch_all(self, operations)
        return original(self, operations)

    return batch if name in STORE_BATCHES else method


def _touch_all(owner: Any, operations: Iterable[Any]) -> None:
    for operation in operations:
        if isinstance(operation, PutOp):
            touch(owner, ("store", *operation.namespace), writes=True)
        elif isinstance(operation, GetOp):
            touch(owner, ("store", *operation.namespace), writes=False)
        elif isinstance(operation, SearchOp):
            touch(owner, ("store", *operation.namespace_prefix), writes=False, below=True)
