"""The weight of the house: each room and wing has a budget in tokens. `make weight` prints the table.

Who needs more raises the number here in the same commit, and says why in its message.
"""

from __future__ import annotations

import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

BUDGET = {
    "base": 24_500,
    "client": 25_900,
    "commands": 15_900,
    "http_listener": 3_500,
    "llms": 10_800,
    "memory_plan": 6_300,
    "openai_dialect": 3_500,
    "processes": 6_200,
    "quickstart": 3_000,
    "rewards": 5_900,
    "scenarios": 2_100,
    "supervised": 3_500,
    "testing": 9_500,
    "tiny": 100,
    "tracing": 5_100,
    "trainer": 17_100,
    "offbook/*.py": 4_700,
    "server/calls": 12_400,
    "server/http": 8_700,
    "server/models": 6_100,
    "server/records": 16_200,
    "server/sampler": 10_500,
    "server/training": 8_700,
    "server/views": 6_600,
    "server/*.py": 12_500,
    "engine/inference": 34_500,
    "engine/learner": 50_100,
    "engine/*.py": 13_600,
    "offbook_art": 2_500,
    "offbook_auto": 17_600,
    "offbook_bases": 9_500,
    "offbook_cloud": 5_600,
    "offbook_compare": 15_900,
    "offbook_dashboard": 19_000,
    "offbook_dialects": 18_600,
    "offbook_langfuse": 9_100,
    "offbook_langgraph": 33_200,
    "offbook_mcp": 68_100,
    "offbook_production": 23_900,
    "offbook_ray": 1_700,
    "offbook_sinks": 9_100,
}
"""Room or wing -> the most tokens of code, as `tokenize` counts them: without comments and blank lines."""

UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def tokens_of(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in UNCOUNTED for token in tokenize.tokenize(file.readline))


def rooms() -> Iterator[tuple[str, list[Path]]]:
    """Each room of the core with its files, those of server and engine one by one, and each wing; what lies directly in a folder
    of rooms counts as one room."""
    for folder in (
        ROOT / "src/offbook",
        ROOT / "src/offbook/server",
        ROOT / "src/offbook/engine",
        ROOT / "integrations",
    ):
        split = ("server", "engine") if folder.name == "offbook" else ()
        inner = [
            path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in (*split, "__pycache__")
        ]
        for room in inner:
            if files := sorted(room.rglob("*.py")):
                yield (
                    room.relative_to(ROOT / "src/offbook" if folder != ROOT / "integrations" else folder).as_posix(),
                    files,
                )
        if direct := sorted(folder.glob("*.py")):
            yield f"{folder.name}/*.py", direct


def test_no_room_is_heavier_than_its_budget() -> None:
    heavy: list[str] = []
    for room, files in rooms():
        tokens, most = sum(map(tokens_of, files)), BUDGET.get(room)
        if most is None:
            heavy.append(f"{room}: a new room of {tokens:,} tokens: name its budget in tests/test_weight.py")
        elif tokens > most:
            heavy.append(
                f"{room}: {tokens:,} tokens, and its budget is {most:,}: take something off, or raise it here and say why"
            )
    assert heavy == []


def main() -> None:
    total = [0, 0, 0]
    print(f"{'room':<28}{'files':>7}{'lines':>9}{'tokens':>9}{'budget':>9}")
    for room, files in rooms():
        row = [len(files), sum(len(path.read_text("utf-8").splitlines()) for path in files), sum(map(tokens_of, files))]
        print(f"{room:<28}{row[0]:>7}{row[1]:>9,}{row[2]:>9,}{BUDGET.get(room, 0):>9,}")
        total = [one + other for one, other in zip(total, row, strict=True)]
    print(f"{'all':<28}{total[0]:>7}{total[1]:>9,}{total[2]:>9,}{sum(BUDGET.values()):>9,}")


if __name__ == "__main__":
    main()
