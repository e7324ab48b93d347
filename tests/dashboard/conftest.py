"""What the tests of pages share: one real run, recorded once, its dashboard, Chromium, and axe."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from offbook.server.records.overview import RolloutRow
from offbook_dashboard.step_groups import group_lines
from tests.dashboard.recorded_run import RUN, record_run
from tests.dashboard.viewing import from_records, viewing
from tests.server.conftest import gateway as gateway

KEPT = 2
"""Of the recorded run's three steps: those whose tokens are kept."""
PLANTED = '<script>document.title = "planted"</script>'


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a server that trained three steps, kept the tokens of the last two, and has ended."""
    folder = tmp_path_factory.getbasetemp() / "recorded"
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1] / "recorded"  # one for all workers: a server and three steps take a minute
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            record_run(folder, keep_tokens=KEPT)
            (folder / "whole").touch()
    return folder / "server"


@pytest.fixture(scope="session")
def widest(recorded: Path) -> RolloutRow:
    """The best rollout of the last step's group whose rewards differ most."""
    lines = group_lines(from_records(recorded, lambda source: source.rollouts(RUN, 2)))
    assert lines[0].learned, "no group of the last step has rewards that differ"
    return max((chip.rollout for chip in lines[0].chips), key=lambda row: row.reward or 0.0)


@pytest.fixture(scope="session")
def planted(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the directory in which a run's name, a scenario's, tool results and an error of step 1 are markup."""
    folder = tmp_path_factory.mktemp("planted") / "server"
    shutil.copytree(recorded, folder)
    records = sqlite3.connect(folder / "records.db")
    with records:
        bodies = records.execute(
            "SELECT calls.id, calls.body FROM calls JOIN trajectories ON trajectories.id = calls.trajectory_id "
            "WHERE trajectories.step = 1"
        ).fetchall()
        for call, body in bodies:
            records.execute("UPDATE calls SET body = ? WHERE id = ?", (_with_markup(body), call))
        records.execute(
            "UPDATE trajectories SET run = ?1, scenario = ?1, "
            "body = json_set(body, '$.place.run', ?1, '$.place.scenario', ?1) WHERE step = 1",
            (PLANTED,),
        )
        records.execute(
            "UPDATE trajectories SET failed = 1, body = json_set(body, '$.exception', json(?)) WHERE step = 1 "
            "AND group_index = 0",
            ('{"type": "<b>ToolError</b>", "message": "<script>1</script>", "traceback": "<script>2</script>"}',),
        )
    records.close()
    return folder


def _with_markup(body: str) -> str:
    """A call's body in which every tool answers with markup."""
    call = json.loads(body)
    for message in call["messages"]:
        if message["role"] == "tool":
            message["content"] = PLANTED
    return json.dumps(call)


@pytest.fixture(scope="session")
def dashboard(recorded: Path) -> Iterator[str]:
    """The URL of the recorded run's dashboard."""
    with viewing(recorded) as url:
        yield url
