"""A run that goes on: its page shows a new step without being loaded again. And `offbook ui`, as a user starts it."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.server.records.overview import RolloutRow
from offbook_dashboard.page_urls import trajectory_url
from offbook_dashboard.source import EngineState
from tests.dashboard.browsing import expect, opened
from tests.dashboard.recorded_run import RUN
from tests.dashboard.viewing import viewing

ENGINE = EngineState(version="1", base_model="tiny", engine="embedded", sampler="ready", learner="ready", training=None)


@pytest.fixture
def unfinished(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run that has just begun: its rollouts, and no update yet."""
    folder = tmp_path / "server"
    shutil.copytree(recorded, folder)
    with closing(sqlite3.connect(folder / "records.db")) as records, records:
        records.execute("CREATE TABLE later AS SELECT * FROM trains")
        records.execute("DELETE FROM trains")
        records.execute("DELETE FROM meta WHERE key LIKE 'ended:%'")
        records.execute(
            "UPDATE trajectories SET ended_at = ? WHERE seq = (SELECT max(seq) FROM trajectories)", (time.time(),)
        )
    return folder


def land(folder: Path, step: int) -> None:
    """The update of a step comes into the records."""
    with closing(sqlite3.connect(folder / "records.db")) as records, records:
        rows = "SELECT * FROM later ORDER BY created_at LIMIT 1 OFFSET ?"
        assert records.execute(f"INSERT INTO trains {rows}", (step - 1,)).rowcount == 1


@pytest.mark.slow("a browser")
def test_the_page_of_a_run_that_goes_on_shows_its_steps_as_they_land(unfinished: Path, chromium: Any) -> None:
    with (
        viewing(unfinished, engine=ENGINE) as url,
        opened(chromium, f"{url}/runs/{RUN}") as (page, said),
    ):
        expect(page.locator("#status")).to_have_class(re.compile("active"))
        expect(page.get_by_text("Nothing has been trained")).to_be_visible()
        newest = page.locator("#steps tbody tr").first.locator("a")
        land(unfinished, 1)
        expect(newest).to_have_text("1")
        page.evaluate("() => { window.notLoadedAgain = true; }")
        land(unfinished, 2)
        expect(newest).to_have_text("2")
        assert page.evaluate("() => window.notLoadedAgain") is True
        expect(page.locator("#facts dd").first).to_contain_text("2 updates")
        values = page.locator("figure details table").first
        expect(values.get_by_text("2", exact=True).first).to_be_attached()
        assert said == []


@pytest.mark.slow("whole trainings")
def test_offbook_ui_serves_a_directory_on_which_no_server_runs(recorded: Path, widest: RolloutRow) -> None:
    words = [sys.executable, "-m", "offbook", "ui", "--dir", str(recorded), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"is at (http://\S+)", line)
            assert found is not None, line
            with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
                for path, words_of_page in (
                    ("/", RUN),
                    (f"/runs/{RUN}", "ended"),
                    (f"/runs/{RUN}/steps/2", "gradient"),
                    (trajectory_url(widest.id), "Transcript"),
                    ("/pages/static/app.css", "--bg"),
                ):
                    answer = client.get(path)
                    assert answer.status_code == 200 and words_of_page in answer.text, path
                assert client.get("/v1/models").status_code == 404  # no engine
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130)
        finally:
            process.kill()
