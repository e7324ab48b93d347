"""A target's tools as LangChain tools, for a user's LangGraph app."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from langchain_core.tools import BaseTool, ToolException
from pydantic import PrivateAttr
from typing_extensions import Unpack

from offbook import current_trajectory
from offbook.base.errors import ConfigError, RolloutError
from offbook.client.rollouts.capture import on_capture_end
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import ConnectOptions, Target, TargetLike

from .rollout_tools import RolloutTools, ToolResult
from .tool import ServerDescription, ToolKind, reads_secrets
from .toolset import ModelTool, Toolset

ResultT = TypeVar("ResultT")
_CLOSE_SECONDS = 30.0


async def open_tools(target: TargetLike, *, max_rollouts: int = 16, **options: Unpack[ConnectOptions]) -> McpTools:
    """Start the servers and return their tools; see `offbook_mcp.mcp_tools`."""
    if max_rollouts < 1:
        raise ConfigError(f"max_rollouts: at least 1 is needed, got {max_rollouts}")
    servers = _Servers(replace(Target.parse(target, **options), allow_all=True, decide=_all_allowed), max_rollouts)
    try:
        toolset = await asyncio.wrap_future(servers.submit(servers.open()))
    except BaseException:
        await asyncio.to_thread(servers.close)
        raise
    return McpTools(servers, toolset)


async def _all_allowed(
    _: Sequence[ServerDescription], tools: Sequence[ModelTool], decisions: Mapping[str, bool]
) -> Mapping[str, bool]:
    """Allow every tool that is not denied: the app decides which its agent gets."""
    known = (tool.name for tool in tools if tool.tool.kind is not ToolKind.UNKNOWN or reads_secrets(tool.tool.name))
    return {**dict.fromkeys(known, True), **decisions}


class McpTools(list[BaseTool]):
    """A list of LangChain tools that owns their servers.

    `close`, `aclose`, leaving `with` or `async with`, and the end of the process end the servers.
    """

    def __init__(self, servers: _Servers, toolset: Toolset) -> None:
        super().__init__(_McpTool.of(servers, tool) for tool in toolset.tools)
        self.toolset = toolset
        self._servers = servers

    def close(self) -> None:
        """End all servers. Later calls of the tools raise RuntimeError."""
        self._servers.close()

    async def aclose(self) -> None:
        """Async form of `close`."""
        await asyncio.to_thread(self._servers.close)

    def __enter__(self) -> McpTools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> McpTools:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Servers:
    """A ServerPool in its own event loop and thread, so that the tools work in any event loop and in sync code."""

    def __init__(self, target: Target, max_rollouts: int) -> None:
        self._target = target
        self._max_rollouts = max_rollouts
        self._pool: ServerPool | None = None
        self._places = asyncio.Semaphore(max_rollouts)  # of rollouts; calls outside of them hold no place
        self._leases: dict[str, asyncio.Task[RolloutTools]] = {}
        self._ended: deque[str] = deque(maxlen=1_000)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="offbook-mcp", daemon=True)
        self._thread.start()
        self._closed = False
        atexit.register(self.close)

    def submit(self, work: Coroutine[object, object, ResultT]) -> Future[ResultT]:
        """Run a coroutine in the pool's event loop. Raises RuntimeError after `close`."""
        if self._closed:
            work.close()
            raise RuntimeError("these MCP tools are closed: call mcp_tools(...) again")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def open(self) -> Toolset:
        """Start the servers and return their tools. Raises McpStartError, ConfigError."""
        pool = ServerPool(self._target, max_rollouts=self._max_rollouts + 1)  # one for the calls outside rollouts
        await pool.__aenter__()
        self._pool = pool
        return pool.toolset

    def call(self, tool: str, arguments: dict[str, object]) -> Future[ToolResult]:
        """Call a tool on the sessions of the current rollout, which end with its capture.

        Calls outside captures share one further set of sessions until `close`, beside the rollouts' sets.
        """
        trajectory = current_trajectory()
        rollout = "" if trajectory is None else trajectory.id
        if rollout and rollout not in self._leases:
            on_capture_end(lambda: self._end_rollout(rollout))
        return self.submit(self._call(rollout, tool, arguments))

    async def _call(self, rollout: str, tool: str, arguments: dict[str, object]) -> ToolResult:
        assert self._pool is not None, "the tools exist only when the pool is open"
        if rollout in self._ended:  # a call from a thread that outlived its rollout
            raise RolloutError(f"{tool}: the rollout that calls it has ended; wait for its threads inside the rollout")
        if rollout not in self._leases:
            self._leases[rollout] = asyncio.create_task(self._lease(self._pool, rollout))
        lease = self._leases[rollout]
        try:
            tools = await asyncio.shield(lease)
        except BaseException:
            if lease.done():
                self._leases.pop(rollout, None)  # the next call tries again
            raise
        return await tools.call(tool, arguments)

    async def _lease(self, pool: ServerPool, rollout: str) -> RolloutTools:
        """Take sessions from the pool. A rollout waits for one of `max_rollouts` places first."""
        if not rollout:
            return await pool.acquire()
        await self._places.acquire()
        try:
            return await pool.acquire()
        except BaseException:
            self._places.release()
            raise

    def _end_rollout(self, rollout: str) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(self._release, rollout)

    def _release(self, rollout: str) -> None:
        self._ended.append(rollout)
        lease = self._leases.pop(rollout, None)
        if lease is not None:
            lease.add_done_callback(self._give_back)

    def _give_back(self, lease: asyncio.Task[RolloutTools]) -> None:
        if self._pool is not None and not lease.cancelled() and lease.exception() is None:
            self._pool.release(lease.result())
            self._places.release()

    def close(self) -> None:
        """End the servers, the loop and the thread."""
        if self._closed:
            return
        ending = self.submit(self._end())
        self._closed = True
        atexit.unregister(self.close)
        try:
            ending.result(_CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self) -> None:
        for lease in self._leases.values():
            lease.cancel()
            lease.add_done_callback(self._give_back)
        self._leases.clear()
        if self._pool is not None:
            await self._pool.__aexit__(None, None, None)
        await self._loop.shutdown_asyncgens()


class _McpTool(BaseTool):
    """One MCP tool. The model reads an error that the tool reports; an McpServerError is raised.

    Not a StructuredTool, since that cannot have arguments named `config` or `run_manager`.
    """

    _servers: _Servers = PrivateAttr()

    @classmethod
    def of(cls, servers: _Servers, tool: ModelTool) -> _McpTool:
        """Create the LangChain tool under the model's name for it, with its JSON schema."""
        own = cls(
            name=tool.name,
            description=tool.tool.description,
            args_schema=tool.parameters,
            handle_tool_error=True,
            metadata={"mcp_server": tool.tool.server, "mcp_kind": tool.tool.kind.value},
        )
        own._servers = servers
        return own

    def _run(self, /, *_: object, **arguments: object) -> str:
        return _text(self._servers.call(self.name, arguments).result())

    async def _arun(self, /, *_: object, **arguments: object) -> str:
        return _text(await asyncio.wrap_future(self._servers.call(self.name, arguments)))


def _text(result: ToolResult) -> str:
    if result.is_error:
        raise ToolException(result.text)
    return result.text
