"""The Python of docs/rewards.md and docs/ruler.md, run as a reader would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbook.testing import LlmReply, LlmRequest, attempts_shown, says, scripted_llm
from tests.docs.test_pages import code_of
from tests.rewards.scripted_judge import verdict


def run(page: str, folder: Path, **variables: str) -> str:
    (folder / "page.py").write_text("\n".join(code_of(page)), "utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_on_rewards_runs(tmp_path: Path) -> None:
    assert run("rewards.md", tmp_path, OPENAI_API_KEY="k", ANTHROPIC_API_KEY="k").splitlines() == [
        "RewardResult(reward=1.1, metrics={'part/right': 1.0, 'part/brief': 1.0, 'part/valid': 1.0})",
        "1.0",
    ]


def opinion(request: LlmRequest) -> LlmReply:
    if len(request.messages) == 1:
        return says(json.dumps({"criteria": ["The right order.", "Nothing invented."]}))
    worth = {"51": 1.0, "54": 0.0}
    shown = attempts_shown(request.messages)
    return verdict(
        [
            {"id": name, "explanation": "as it is", "score": worth.get(str(each[0].messages[-1]["content"]), 0.8)}
            for name, each in shown.items()
        ]
    )


@pytest.mark.slow("whole trainings")
def test_the_page_on_ruler_runs(tmp_path: Path) -> None:
    with scripted_llm(opinion) as endpoint:
        printed = run("ruler.md", tmp_path, OPENAI_API_BASE=endpoint.url, OPENAI_API_KEY="k").splitlines()
    assert printed[:3] == [f"{score} RULER explanation: as it is" for score in ("1.00", "0.80", "0.00")]
    assert printed[3].startswith("rubric (") and printed[4:] == ["- The right order.", "- Nothing invented."]
