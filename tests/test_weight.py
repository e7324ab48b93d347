"""The weight of the house: each room and wing has a budget in tokens. `make weight` prints the table.

Who needs more raises the number here in the same commit, and says why in its message.
"""

from __future__ import annotations

import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

BUDGET = {
    "base": 24_600,
    "client": 26_000,
    "commands": 16_700,
    "http_listener": 3_300,
    "llms": 10_700,
    "memory_plan": 4_900,
    "openai_dialect": 3_500,
    "processes": 6_200,
    "quickstart": 3_000,
    "rewards": 5_700,
    "scenarios": 2_100,
    "supervised": 3_500,
    "testing": 7_300,
    "tiny": 100,
    "tracing": 5_100,
    "trainer": 17_100,
    "offbook/*.py": 2_000,
    "server/calls": 12_400,
    "server/http": 7_200,
    "server/models": 5_300,
    "server/records": 15_900,
    "server/sampler": 10_200,
    "server/training": 8_200,
    "server/views": 5_900,
    "server/*.py": 11_600,
    "engine/inference": 35_900,
    "engine/learner": 48_500,
    "engine/*.py": 13_500,
    "offbook_art": 2_500,
    "offbook_auto": 16_300,
    "offbook_bases": 9_700,
    "offbook_cloud": 5_600,
    "offbook_compare": 14_700,
    "offbook_dashboard": 16_900,
    "offbook_dialects": 18_400,
    "offbook_langfuse": 8_400,
    "offbook_langgraph": 31_000,
    "offbook_mcp": 63_700,
    "offbook_production": 21_300,
    "offbook_ray": 1_600,
    "offbook_sinks": 8_400,
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
