"""The workflows of GitHub: YAML with jobs, whose actions are pinned by commit."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_each_action_is_pinned_by_commit_and_each_job_has_a_time_limit(name: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))["jobs"]
    assert jobs
    for job in jobs.values():
        assert job["timeout-minutes"] > 0
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
