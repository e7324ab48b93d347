"""What the tests of other clients saw, in `results.json`, of which the table of `docs/frameworks.md` is made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_name("results.json")
WRITE = "OFFBOOK_WRITE_RESULTS"
"""Environment variable: the tests then write what they see, instead of comparing it."""
Mode = Literal["whole", "streamed"]


@dataclass(frozen=True)
class Result:
    """An agent that calls tools and then answers. `calls` reached the model, `recorded` were recorded, and `extends` says
    whether each prompt extends the one before with exactly what was sampled. `modes`: how its answers came."""

    runs_on: str
    agent: str
    version: str
    api: str
    calls: int
    recorded: int
    extends: bool
    modes: tuple[Mode, ...]


def mode_of(requests: Sequence[dict[str, Any]]) -> Mode:
    """How the answers to these requests came: all of them in the same way."""
    [streamed] = {bool(request.get("stream")) for request in requests}
    return "streamed" if streamed else "whole"


def results() -> list[Result]:
    """All results, in the table's order."""
    return [Result(**row | {"modes": tuple(row["modes"])}) for row in json.loads(FILE.read_text("utf-8"))]


def check(seen: Result) -> None:
    """Compare a result, in one of its modes or all, with the written one, or write it if WRITE is set."""
    known = {(row.runs_on, row.agent, row.api): row for row in results()}
    key = seen.runs_on, seen.agent, seen.api
    before = known.get(key)
    same = before is not None and replace(before, modes=seen.modes) == seen
    if not os.environ.get(WRITE):
        assert before is not None and same and set(seen.modes) <= set(before.modes), (
            f"{before} was written: run `python scripts/frameworks_table.py --run` if {seen} is right"
        )
        return
    modes = sorted({*seen.modes, *(before.modes if same and before is not None else ())}, reverse=True)
    known[key] = replace(seen, modes=tuple(modes))
    rows = [asdict(known[key]) for key in sorted(known)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
