"""A pool of sessions with a target's servers. Rollouts share a session where that is safe; others get their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from offbook.base.errors import ConfigError
from offbook.base.locked_folders import TemporaryFolder
from offbook_mcp.errors import McpServerError, McpToolsChangedError
from offbook_mcp.tools.rollout_tools import RolloutTools
from offbook_mcp.tools.tool import ServerDescription, fingerprint, signature
from offbook_mcp.tools.toolset import Toolset, make_toolset

from .servers import AnyServer
from .session import Session
from .target import Target


class RolloutFolders:
    """Creates and removes the folders of rollouts inside one temporary folder."""

    def __init__(self, fixture: Path | None) -> None:
        self._fixture = fixture
        self._folder = TemporaryFolder("mcp")
        self._root = self._folder.path.resolve()  # some servers compare resolved paths
        self._numbers = itertools.count(1)

    async def make(self) -> Path:
        """Create a folder: a copy of the fixture, or an empty one. Raises OSError, and ConfigError for a link in the fixture
        that leads out of it: through it, rollouts would change the user's own files."""
        folder = self._root / f"{next(self._numbers):04}"
        if self._fixture is None:
            folder.mkdir()
        else:
            await asyncio.to_thread(_copy_closed, self._fixture, folder)
        return folder

    async def remove(self, folder: Path) -> None:
        """Remove one folder. A file that cannot be removed stays until `close`."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders."""
        self._folder.remove()


@dataclass
class _SessionSet:
    folder: Path | None
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])


class ServerPool:
    """Sessions for rollouts: `async with ServerPool(target) as pool`, then `async with pool.rollout() as tools` per rollout.

    All rollouts share a server's session if the target is stateless. By default they also share it if the server annotates
    every tool as read-only and does not depend on the rollout's folder. For other servers every rollout gets its own session;
    `ahead` of them are started in advance. At most `max_rollouts` rollouts run at a time, others wait, so a server has at
    most `max_rollouts + ahead` processes. Use the pool only in the event loop that entered it. Raises ConfigError for a
    number out of range.
    """

    def __init__(self, target: Target, *, max_rollouts: int = 16, ahead: int = 2) -> None:
        if max_rollouts < 1 or ahead < 0:
            raise ConfigError(f"max_rollouts, ahead: at least 1 and 0 are needed, got {max_rollouts} and {ahead}")
        self.target = target
        self.servers: tuple[ServerDescription, ...] = ()
        self.shared: tuple[str, ...] = ()
        self.offered = Toolset(())  # all tools; `toolset` has those that may be called
        self.toolset = Toolset(())
        self.fingerprint = ""
        self._ahead = ahead
        self._slots = asyncio.Semaphore(max_rollouts)
        self._shared_sessions: dict[str, Session] = {}
        self._restarting = asyncio.Lock()
        self._starting: deque[asyncio.Task[_SessionSet]] = deque()
        self._leased: set[RolloutTools] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._signatures: dict[tuple[str, str], str] = {}
        self._folders: RolloutFolders | None = None
        self._open = False

    async def __aenter__(self) -> ServerPool:
        """Start every server once. Raises McpStartError, ConfigError."""
        if self.target.uses_folder:
            self._folders = RolloutFolders(self.target.fixture)
        first = _SessionSet(None)
        try:
            first = await self._start_sessions(self.target.servers)
            self._learn(first)
            await self._decide()
        except BaseException:
            await asyncio.gather(*(session.close() for session in self._shared_sessions.values()))
            await self._close_sessions(first)
            self._close_folders()
            raise
        self._open = True
        if first.sessions:
            self._starting.append(asyncio.create_task(_ready(first)))
        else:
            await self._close_sessions(first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all servers, also those of running rollouts."""
        self._open = False
        for tools in list(self._leased):
            self.release(tools)
        ready = [self._discard(task) for task in self._starting]
        self._starting.clear()
        sessions = [session.close() for session in self._shared_sessions.values()]
        await asyncio.gather(*ready, *sessions, *self._retiring, return_exceptions=True)
        self._close_folders()

    def sharing(self) -> str:
        """Describe which servers rollouts share."""
        if len(self.shared) == len(self.target.servers):
            return f"rollouts share one session ({'as asked' if self.target.stateless else 'every tool is read-only'})"
        if self.shared:
            return f"rollouts share {', '.join(self.shared)}, and have their own session of the others"
        return "each rollout has a session of its own"

    @asynccontextmanager
    async def rollout(self) -> AsyncGenerator[RolloutTools]:
        """The tools of one rollout. Waits for a free slot. Raises McpServerError when a server cannot be started."""
        tools = await self.acquire()
        try:
            yield tools
        finally:
            self.release(tools)

    async def acquire(self) -> RolloutTools:
        """Like `rollout`, without a block: call `release` afterwards. Raises RuntimeError if the pool is not open."""
        await self._slots.acquire()
        session_set: _SessionSet | None = None
        try:
            if not self._open:
                raise RuntimeError("the pool is not open: `async with ServerPool(target) as pool`")
            session_set = await self._take_sessions()
            sessions = {server.name: await self._session(server, session_set) for server in self.target.servers}
        except BaseException:
            self._background(self._retire(session_set or _SessionSet(None)))
            raise
        tools = RolloutTools(self.toolset, sessions, session_set.folder, self.target.limits)
        self._leased.add(tools)
        return tools

    def release(self, tools: RolloutTools) -> None:
        """End a rollout's own sessions and remove its folder, in the background. Then its slot is free."""
        if tools not in self._leased:
            return
        self._leased.remove(tools)
        own = {name: session for name, session in tools.sessions.items() if name not in self.shared}
        self._background(self._retire(_SessionSet(tools.folder, own)))

    def _learn(self, first: _SessionSet) -> None:
        """Describe the servers from their first sessions, and move the sessions that can be shared out of `first`."""
        self.servers = tuple(first.sessions[server.name].description for server in self.target.servers)
        self.offered = make_toolset(self.servers, only=self.target.only, bind=self.target.bind)
        folder = str(first.folder) if first.folder else None
        self.fingerprint = fingerprint(self.servers, folder)
        self._signatures = _signatures(self.servers, folder)
        self.shared = tuple(server.name for server in self.target.servers if self._shareable(server))
        for name in self.shared:
            self._shared_sessions[name] = first.sessions.pop(name)

    async def _decide(self) -> None:
        """Keep the tools that may be called: those that say that they only read, and those that the user allows."""
        target = self.target
        decisions: dict[str, bool] = {
            **dict.fromkeys(self.offered.named(target.allow, "allow"), True),
            **dict.fromkeys(self.offered.named(target.deny, "deny"), False),
        }
        if target.decide is not None:
            decisions = dict(await target.decide(self.servers, self.offered.tools, decisions))
        self.toolset = self.offered.permitted(decisions, allow_all=target.allow_all)

    def _shareable(self, server: AnyServer) -> bool:
        if self.target.stateless is not None:
            return self.target.stateless
        description = next(known for known in self.servers if known.name == server.name)
        return description.read_only and not server.uses_folder

    async def _take_sessions(self) -> _SessionSet:
        """Take sessions that were started in advance, or start new ones. Starts the next ones in the background."""
        own = [server for server in self.target.servers if server.name not in self.shared]
        if not own:
            return await self._start_sessions(())
        if not self._starting:
            self._start_ahead(own)
        task = self._starting.popleft()
        while len(self._starting) < self._ahead:
            self._start_ahead(own)
        try:
            session_set = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._background(self._discard(task))
            raise
        if all(session.usable for session in session_set.sessions.values()):
            return session_set
        await self._close_sessions(session_set)  # a server ended while it waited
        return await self._start_sessions(own)

    def _start_ahead(self, own: list[AnyServer]) -> None:
        self._starting.append(asyncio.create_task(self._start_sessions(own), context=Context()))

    async def _start_sessions(self, servers: tuple[AnyServer, ...] | list[AnyServer]) -> _SessionSet:
        """Create a folder and start a session with every server. Raises McpServerError after cleaning up."""
        session_set = _SessionSet(await self._folders.make() if self._folders is not None else None)
        starts = [asyncio.create_task(self._start(server, session_set.folder)) for server in servers]
        try:
            for server, start in zip(servers, starts, strict=True):
                session_set.sessions[server.name] = await start
        except BaseException:
            for start in starts:
                start.cancel()
            for server, result in zip(servers, await asyncio.gather(*starts, return_exceptions=True), strict=True):
                if isinstance(result, Session):
                    session_set.sessions[server.name] = result
            await self._close_sessions(session_set)
            raise
        return session_set

    async def _start(self, server: AnyServer, folder: Path | None) -> Session:
        session = await Session.start(server, folder, self.target.limits)
        try:
            self._check_same(session.description, str(folder) if folder else None)
        except McpServerError:
            await session.close()
            raise
        return session

    def _check_same(self, description: ServerDescription, folder: str | None) -> None:
        now = _signatures((description,), folder)
        for tool in self.toolset.tools:
            key = (tool.tool.server, tool.tool.name)
            if tool.tool.server == description.name and now.get(key) != self._signatures[key]:
                raise McpToolsChangedError(description.name, f"a new session has another {tool.name}, or none")

    async def _session(self, server: AnyServer, session_set: _SessionSet) -> Session:
        """The rollout's own session, else the shared one, which is restarted if it has failed."""
        if server.name in session_set.sessions:
            return session_set.sessions[server.name]
        async with self._restarting:
            session = self._shared_sessions[server.name]
            if not session.usable:
                self._shared_sessions[server.name] = await self._start(server, None)
                self._background(session.close())
            return self._shared_sessions[server.name]

    async def _retire(self, session_set: _SessionSet) -> None:
        try:
            await self._close_sessions(session_set)
        finally:
            self._slots.release()

    async def _close_sessions(self, session_set: _SessionSet) -> None:
        await asyncio.gather(*(session.close() for session in session_set.sessions.values()))
        if session_set.folder is not None and self._folders is not None:
            await self._folders.remove(session_set.folder)

    async def _discard(self, task: asyncio.Task[_SessionSet]) -> None:
        """Cancel a start that is no longer needed, or close the sessions that it started."""
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            await self._close_sessions(task.result())

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, context=Context())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _close_folders(self) -> None:
        if self._folders is not None:
            self._folders.close()


def _copy_closed(fixture: Path, folder: Path) -> None:
    """Copy a folder with its links, every one of which must lead to a place inside the copy. `folder` is resolved."""
    shutil.copytree(fixture, folder, symlinks=True)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                raise ConfigError(
                    f"fixture: the link {str(fixture / path.relative_to(folder))!r} leads to {os.readlink(path)!r}, outside "
                    "the copy that each rollout gets: replace it by what it names, or by a relative link inside the fixture"
                )


async def _ready(session_set: _SessionSet) -> _SessionSet:
    return session_set


def _signatures(servers: tuple[ServerDescription, ...], folder: str | None) -> dict[tuple[str, str], str]:
    return {(server.name, tool.name): signature(tool, folder) for server in servers for tool in server.tools}
