"""Numbers on the pages of a real run equal those of its metrics."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import httpx
import pytest

from offbook.base.alerts import taught_share
from offbook.engine import checkpoint_files
from offbook.server.models.checkpoints import state_of
from offbook.server.views.numbers import fixed, number, percent
from tests.dashboard.recorded_run import MODEL, RUN

pytestmark = pytest.mark.slow("whole trainings")


def test_the_charts_and_the_table_have_the_learners_numbers(recorded: Path, dashboard: str) -> None:
    folder = recorded / "pages" / "models" / MODEL / "checkpoints"
    metrics = {
        step: state_of(checkpoint_files.read(checkpoint_files.path_of(folder, step))).metrics for step in (1, 2, 3)
    }
    page = httpx.get(f"{dashboard}/runs/{RUN}", trust_env=False, timeout=60).text
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    [run] = json.loads(html.unescape(found[1]))
    lines = {(chart["key"], part["label"]): part for chart in run["charts"] for part in chart["parts"]}
    assert run["x"]["updates"]["step"] == [1, 2, 3]
    for (key, label), name in {
        ("reward", "mean"): "reward/mean",
        ("loss", "loss"): "loss/value",
        ("entropy", "entropy"): "entropy",
        ("kl", "to the base"): "kl/base",
        ("dropped", "no spread"): "groups/no_spread",
    }.items():
        assert lines[key, label]["y"] == [metrics[step][name] for step in (1, 2, 3)], name
    assert lines["reward", "mean"]["spread"] == [metrics[step]["reward/std"] for step in (1, 2, 3)]
    for step in (1, 2, 3):
        row = re.search(rf'<tr><th scope="row"><a href="[^"]+/steps/{step - 1}">{step}</a></th>(.*?)</tr>', page)
        assert row is not None
        cells = re.findall(r'<td class="num">(.*?)</td>', row[1])
        assert cells[:2] == [fixed(metrics[step]["reward/mean"], 3), fixed(metrics[step]["reward/std"], 3)]
        assert cells[3:5] == [percent(taught_share(metrics[step])), number(metrics[step]["tokens/trained"])]


def test_a_steps_page_agrees_with_the_records_and_the_learner(recorded: Path, dashboard: str) -> None:
    with httpx.Client(base_url=dashboard, trust_env=False, timeout=60) as client:
        page = client.get(f"/runs/{RUN}/steps/1").text
        data = client.get(f"/pages/data/runs/{RUN}").json()
    reward = next(chart for chart in data["charts"] if chart["key"] == "reward")["parts"][0]
    dropped = next(chart for chart in data["charts"] if chart["key"] == "dropped")["parts"][0]
    assert f"<dd>{fixed(reward['y'][1], 3)} <small>spread {fixed(reward['spread'][1], 3)}</small>" in page
    assert page.count("✓ gradient") == 4 - dropped["y"][1]
    assert "made step 2 of clerk" in page and page.count('class="b-sampling"') > 16
