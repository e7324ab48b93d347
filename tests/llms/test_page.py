"""The Python of docs/llms.md, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbook.testing import says, scripted_llm
from tests.paths import ROOT


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_page_prints_what_it_tells(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/llms.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks), "utf-8")
    with scripted_llm([says('{"score": 0.25, "why": "half"}', usage=(1000, 100))]) as endpoint:
        variables = {"OPENAI_API_BASE": endpoint.url, "OPENAI_API_KEY": "key-of-a-reader"}
        done = subprocess.run(
            [sys.executable, "page.py"],
            cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0.25 Tokens(prompt=1000, completion=100) 0.00280 USD",
        "True 0.0",
        "judge: 2 questions (1 from the cache), 1 request, 1,000 + 100 tokens, 0.0028 USD",
        "0.7",
        "refused 3",
    ]
    assert (tmp_path / ".offbook" / "llms.sqlite").exists()
