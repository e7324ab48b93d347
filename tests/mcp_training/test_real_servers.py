"""Servers that nobody here wrote, offline: at least 12 valid scenarios each, and 24 of `time`; rollouts and a
step of training on one of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook import LocalBackend, TrainableModel
from offbook.base.types import new_id
from offbook_mcp import MCPTrainer, Target
from offbook_mcp.connection.servers import ROLLOUT_DIR
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.scenarios.scenario import ScenarioSet
from tests.mcp_adapter.conftest import python_module
from tests.mcp_adapter.test_scenarios import check_sound
from tests.mcp_training.conftest import time_target

ENTITIES = {"Ada": ("person", "likes tea"), "Delft": ("city", "has canals"), "Orchard": ("project", "starts in May")}
RELATIONS = [("Ada", "Delft", "lives in"), ("Ada", "Orchard", "leads")]
Trained = Callable[..., ScenarioSet]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    """A server for `tiny-mcp`."""
    running = LocalBackend(tmp_path_factory.mktemp("real-servers"), threads=1)
    yield running
    running.close()


@pytest.fixture
def trained(backend: LocalBackend) -> Trained:
    """`trained(target)` makes scenarios, trains one step on them and returns them."""

    def one_step(target: Target) -> ScenarioSet:
        scenarios = made(target)
        model = TrainableModel(new_id("real"), base_model="tiny-mcp", backend=backend)
        trainer = MCPTrainer(
            target, model, scenarios, group_size=4, scenarios_per_step=4, temperature=1.5, say=lambda line: None
        )
        report = trainer.train(1)
        assert report.step == 1
        assert [each.failed for each in report.evaluations] == [0, 0]
        return scenarios

    return one_step


def made(target: Target, count: int = 14) -> ScenarioSet:
    """Valid scenarios of a server, of which at most two are missing."""
    scenarios = asyncio.run(generate_scenarios(target, count=count))
    check_sound(scenarios, at_least=count - 2)
    return scenarios


def tools_of(scenarios: ScenarioSet) -> set[str]:
    return {tool for each in scenarios.scenarios for tool in each.tools}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    lines: list[dict[str, object]] = []
    for name, (kind, fact) in ENTITIES.items():
        lines.append({"type": "entity", "name": name, "entityType": kind, "observations": [fact]})
    for one, other, kind in RELATIONS:
        lines.append({"type": "relation", "from": one, "to": other, "relationType": kind})
    (tmp_path / "memory.json").write_text("\n".join(json.dumps(line) for line in lines))
    return tmp_path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in {
        "a.txt": "teal\nochre\n",
        "docs/guide.md": "# Guide\nStart\n",
        "data/b.csv": "name,age\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow("scenarios of a server that nobody here wrote")
def test_time() -> None:
    assert tools_of(made(time_target(), 26)) == {"get_current_time", "convert_time"}


@pytest.mark.slow("a step on a server that nobody here wrote")
def test_git(repository: Path, trained: Trained) -> None:
    target = Target.parse(
        python_module("mcp_server_git"),
        fixture=repository,
        bind={"repo_path": ROLLOUT_DIR},
        stateless=True,
        allow_all=True,
    )
    assert {"git_log", "git_show", "git_diff", "git_create_branch"} <= tools_of(trained(target))


@pytest.mark.slow("scenarios of a server that nobody here wrote")
def test_everything(node_server: Callable[[str], str]) -> None:
    tools = tools_of(made(Target.parse(node_server("everything"), allow_all=True)))
    assert {"echo", "get-sum", "get-structured-content"} <= tools and "get-env" not in tools


@pytest.mark.slow("scenarios of a server that nobody here wrote")
def test_filesystem(node_server: Callable[[str], str], files: Path) -> None:
    target = Target.parse(f"{node_server('filesystem')} {ROLLOUT_DIR}", fixture=files, allow_all=True)
    assert {"read_text_file", "write_file", "list_directory"} <= tools_of(made(target, 20))


@pytest.mark.slow("scenarios of a server that nobody here wrote")
def test_memory_only_read(node_server: Callable[[str], str], graph: Path) -> None:
    target = Target.parse(f"MEMORY_FILE_PATH={ROLLOUT_DIR}/memory.json {node_server('memory')}", fixture=graph)
    scenarios = made(target)
    assert {"open_nodes", "search_nodes"} <= tools_of(scenarios)
    assert {"open_nodes", "search_nodes"} <= {tool for each in scenarios.eval for tool in each.tools}


@pytest.mark.slow("scenarios of a server that nobody here wrote")
def test_memory_that_starts_empty(node_server: Callable[[str], str]) -> None:
    target = Target.parse(f"MEMORY_FILE_PATH={ROLLOUT_DIR}/memory.json {node_server('memory')}", allow_all=True)
    assert "create_entities" in tools_of(made(target))
