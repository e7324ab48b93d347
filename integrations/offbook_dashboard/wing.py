"""The dashboard of a running server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fastapi import FastAPI
from starlette.types import ASGIApp, Scope

import offbook
from offbook.server.http.auth import Guard
from offbook.server.wing import ServerWing

from .sign_in import to_sign_in
from .site import add_pages
from .source import DashboardSource, EngineState


class DashboardWing(ServerWing):
    """The pages beside the API, and the sign-in page of a server with a key."""

    name: ClassVar[str] = "dashboard"

    def add_to(self, app: FastAPI, guard: Guard) -> None:
        """Add the pages."""
        self._guard = guard
        add_pages(app, DashboardSource(self.server.store, self.server.options.dir, self._engine_state), guard)

    def sign_in(self, scope: Scope, headers: Mapping[str, str]) -> ASGIApp | None:
        """The redirect of a browser's page to the sign-in page."""
        return to_sign_in(scope, headers)

    def ready_rows(self, url: str) -> Sequence[tuple[str, str]]:
        """The address, on a server with a key a link that signs one browser in."""
        sessions = self._guard.sessions
        if sessions is None:
            return [("dashboard", f"{url}/")]
        return [("dashboard", f"{url}{sessions.one_time_link()} (signs one browser in, within 15 minutes)")]

    def _engine_state(self) -> EngineState:
        server, learner = self.server, self.server.learner
        facts = [learner.state, *(f"{name} {value}" for name, value in learner.facts.items())] if learner else ["off"]
        return EngineState(
            version=offbook.__version__,
            base_model=server.base.name,
            engine=server.engine.described(),
            sampler=server.sampler.state,
            learner=", ".join(facts),
            training=server.training.running,
        )
