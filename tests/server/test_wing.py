"""The example of a wing in docs/architecture.md, installed beside the core and served."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.server.wing import ServerWing, close_wings, tell_of_new_step
from tests.paths import ROOT
from tests.server.servers import RunningServer, without_engine

PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
[CODE] = re.findall(r"```python\n(# offbook_hits/__init__\.py\n.*?)```", PAGE, re.DOTALL)
[ENTRY_POINTS] = re.findall(r"```toml\n(\[project\.entry-points.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def flags() -> Iterator[tuple[str, ...]]:
    with without_engine() as flags:
        yield flags


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as an installed distribution, for the processes that this one starts."""
    site = tmp_path / "site"
    (site / "offbook_hits").mkdir(parents=True)
    (site / "offbook_hits/__init__.py").write_text(CODE, "utf-8")
    facts = site / "offbook_hits-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: offbook-hits\nVersion: 1.0\n")
    lines = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", ENTRY_POINTS).replace('"', "")
    (facts / "entry_points.txt").write_text(lines)
    monkeypatch.setenv("PYTHONPATH", str(site))


def test_the_wing_of_the_page_has_its_command_option_table_route_and_middleware(
    installed: None, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    offbook = [sys.executable, "-m", "offbook"]
    assert "Say where the hits are." in subprocess.run([*offbook, "--help"], capture_output=True, text=True).stdout
    shown = subprocess.run([*offbook, "hits"], capture_output=True, text=True)
    assert (shown.stdout, shown.returncode) == ("GET /api/hits on the server\n", 0)
    with RunningServer(tmp_path / "served", *flags, "--hits") as server:
        server.http.get("/api/models")
        counts = server.http.get("/api/hits").json()
        assert counts["/api/models"] == 1
        server.interrupt()
        server.process.wait(60)
    with RunningServer(tmp_path / "served", *flags, "--hits") as server:
        assert server.http.get("/api/hits").json()["/api/models"] == 1, "the counts were not in the records"


def test_a_wing_that_no_option_asks_for_adds_nothing(installed: None, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with RunningServer(tmp_path / "served", *flags) as server:
        assert server.http.get("/api/hits").status_code == 404


class BrokenWing(ServerWing):
    name = "broken"

    def model_changed(self) -> None:
        raise OSError("no change")

    async def close(self, deadline: float) -> None:
        raise OSError("no end")


class WorkingWing(ServerWing):
    name = "working"
    calls: list[str]

    def model_changed(self) -> None:
        self.calls.append("changed")

    async def close(self, deadline: float) -> None:
        self.calls.append("closed")


async def test_a_wing_that_fails_ends_no_step_and_keeps_no_other_wing_from_it(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = None
    working = WorkingWing(None, nothing)
    working.calls = []
    wings: dict[str, ServerWing] = {"broken": BrokenWing(None, nothing), "working": working}
    tell_of_new_step(wings)
    await close_wings(wings, 0)
    assert working.calls == ["changed", "closed"]
    assert [record.getMessage() for record in caplog.records] == ["The wing 'broken' failed"] * 2
