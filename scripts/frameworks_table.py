"""Write the table of clients in docs/frameworks.md from what their tests saw: `python scripts/frameworks_table.py`.

With `--run`, run these tests first, so that they write what they see to tests/client/results.json. Needs what they need:
make python-clients, make node-clients, and command-line agents on PATH; the others keep their rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "frameworks.md"
RESULTS = ROOT / "tests" / "client" / "results.json"
TESTS = ("tests/client/sdks", "tests/processes/test_clis.py")
BEGIN, END = "<!-- made by scripts/frameworks_table.py -->\n", "<!-- end -->\n"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| on | agent | version | API | calls | recorded | extends | streamed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        extends = "yes" if row["extends"] else "no"
        streamed = {1: "always", 2: "too"}[len(row["modes"])] if "streamed" in row["modes"] else "not seen"
        fields = [row["runs_on"], f"`{row['agent']}`", row["version"], row["api"], row["calls"], row["recorded"]]
        lines.append(f"| {' | '.join(map(str, [*fields, extends, streamed]))} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + table(json.loads(RESULTS.read_text("utf-8"))) + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--run" in sys.argv:
        command = [sys.executable, "-m", "pytest", "--all", "-n", "0", *TESTS]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OFFBOOK_WRITE_RESULTS": "1"}, check=True)
    PAGE.write_text(page(), "utf-8")
