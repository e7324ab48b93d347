"""The sync twins of async methods, `train` of `atrain` and so on, jobs that end together, and blocking work in a thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from .errors import WrongLoopError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_THREADS = 256
"""Threads of the loop's default pool, where LangChain runs what is sync in an async app. asyncio's own pool has four more
than the machine has cores: on two cores, only six of 32 rollouts would get past a sync node at once."""


def run_sync(
    twin: Callable[Arguments, Coroutine[Any, Any, Result]], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Run an async method, whose name begins with `a`, for its sync twin. Raises WrongLoopError inside a running event
    loop. After Ctrl-C, the KeyboardInterrupt that ends a script is shown as one line instead of a traceback."""
    if _is_loop_running():
        raise WrongLoopError(twin.__name__.removeprefix("a"), twin.__name__)
    try:
        return asyncio.run(_with_many_threads(twin(*args, **options)))
    except KeyboardInterrupt as interrupt:
        _show_as_one_line(interrupt)
        raise


async def _with_many_threads(work: Coroutine[Any, Any, Result]) -> Result:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, "offbook-sync"))
    return await work


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _show_as_one_line(interrupt: KeyboardInterrupt) -> None:
    """If nobody catches `interrupt`, Python prints it through `sys.excepthook`."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is interrupt:
            sys.stderr.write("offbook: interrupted\n")
        else:
            shown(kind, error, trace)

    sys.excepthook = show


async def gather_all(jobs: Sequence[Awaitable[Result]]) -> list[Result]:
    """Await all jobs. After the first exception, cancel the others, wait until they ended, and re-raise it."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def in_own_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a new thread with a copy of this context. A cancelled caller does not stop the thread, and the end of
    the process does not wait for it, as it does for the threads of an executor."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()
    context = copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except StopIteration as raised:  # a future rejects StopIteration
            error = RuntimeError(f"the function raised {raised!r}")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001  # passed on to the awaiting task
            error = raised
        with suppress(RuntimeError):  # the loop has ended, so nothing waits for the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="offbook-work", daemon=True).start()
    return await done
