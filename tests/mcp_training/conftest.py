"""Models over a scripted policy, and servers to train on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offbook import LocalBackend, RemoteBackend, TrainableModel
from offbook.base.types import new_id
from offbook.testing import ScriptedServer, scripted_server
from offbook_mcp import Target
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall
from tests.fakes.obedient_policy import obey
from tests.mcp_adapter.conftest import node_server, processes_of_others, python_module, repository  # noqa: F401  # fixtures


def time_target(**options: object) -> Target:
    """`mcp-server-time`, a real server."""
    return Target.parse(python_module("mcp_server_time", "--local-timezone", "UTC"), **options)  # type: ignore[arg-type]


def told(task: str, *calls: tuple[str, dict[str, object]], answer: tuple[str, ...] = (), **more: object) -> McpScenario:
    """A scenario whose solution are these calls."""
    references = tuple(ReferenceCall(tool=tool, arguments=arguments) for tool, arguments in calls)
    fields: dict[str, object] = {
        "id": new_id("scenario"),
        "task": task,
        "difficulty": 1,
        "tools": tuple(dict.fromkeys(tool for tool, _ in calls)),
        "check": CheckKind.ANSWER if answer else CheckKind.CALLS,
        "calls": references,
        "answer": answer,
    }
    return McpScenario.model_validate(fields | more)


@pytest.fixture(scope="session")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """The real server over a scripted model that does what it is told."""
    with scripted_server(obey, tmp_path_factory.mktemp("obedient")) as running:
        yield running


@pytest.fixture
def stand_in(obedient: ScriptedServer) -> TrainableModel:
    """A model there."""
    return TrainableModel(name=new_id("tools"), base_model="tiny", backend=RemoteBackend(obedient.url))


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model of the tiny policy."""
    return TrainableModel(name=new_id("tools"), base_model="tiny", backend=local_backend)
