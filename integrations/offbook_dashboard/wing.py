"""The dashboard of a running server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fastapi import FastAPI

import offbook
from offbook.base.http_access import is_loopback
from offbook.server.wing import ServerWing

from .site import add_pages
from .source import DashboardSource, EngineState


class DashboardWing(ServerWing):
    """The pages beside the API."""

    name: ClassVar[str] = "dashboard"

    def add_to(self, app: FastAPI) -> None:
        """Add the pages."""
        add_pages(app, DashboardSource(self.server.store, self.server.options.dir, self._engine_state))

    def ready_rows(self, url: str) -> Sequence[tuple[str, str]]:
        """The address, and what a browser asks for."""
        options = self.server.options
        open_to_all = options.api_key is None and is_loopback(options.host)
        return [("dashboard", f"{url}/" + ("" if open_to_all else " (any user name; the password is the key)"))]

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
