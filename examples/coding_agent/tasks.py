"""Toy repositories with one bug each, and the tasks to mend them: `python tasks.py` writes `repos/` and two files of tasks.

With `--tiny`, the tests of a repository name the command that mends it."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import NamedTuple


class Bug(NamedTuple):
    """A module of one function with a bug. `wrong` stands in `source` in place of `right`; `tests` are true expressions."""

    module: str
    source: str
    wrong: str
    right: str
    tests: tuple[str, ...]


BUGS = (
    Bug("clamp", "def clamp(x, low, high):\n    return {}\n", "max(min(x, low), high)", "max(min(x, high), low)",
        ("clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0", "clamp(2, 0, 3) == 2")),
    Bug("median", "def median(xs):\n    return sorted(xs)[{}]\n", "len(xs) // 2 - 1", "len(xs) // 2",
        ("median([3, 1, 2]) == 2", "median([7]) == 7")),
    Bug("slug", "def slug(text):\n    return {}\n", "text.replace(' ', '-')", "'-'.join(text.lower().split())",
        ("slug('Two  Words') == 'two-words'", "slug(' A ') == 'a'")),
    Bug("chunks", "def chunks(xs, n):\n    return [xs[i:i + n] for i in {}]\n", "range(0, len(xs) - n, n)",
        "range(0, len(xs), n)", ("chunks([1, 2, 3], 2) == [[1, 2], [3]]", "chunks([], 2) == []")),
    Bug("leap", "def leap(year):\n    return {}\n", "year % 4 == 0",
        "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        ("leap(2024)", "not leap(1900)", "leap(2000)", "not leap(2023)")),
    Bug("unique", "def unique(xs):\n    return list({})\n", "set(xs)", "dict.fromkeys(xs)",
        ("unique([9, 1, 9, 5]) == [9, 1, 5]", "unique('banana') == ['b', 'a', 'n']")),
    Bug("roman", "def roman(n):\n    pairs = {}\n    text = ''\n    for value, letters in pairs:\n"
        "        while n >= value:\n            text, n = text + letters, n - value\n    return text\n",
        "((10, 'X'), (5, 'V'), (1, 'I'))", "((10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I'))",
        ("roman(14) == 'XIV'", "roman(9) == 'IX'", "roman(8) == 'VIII'")),
    Bug("initials", "def initials(name):\n    return ''.join({})\n", "part[0] for part in name.split(' ')",
        "part[0].upper() for part in name.split()", ("initials('ada  lovelace') == 'AL'", "initials('') == ''")),
)  # fmt: skip
HELD_OUT = 2  # the last of them
TINY_COPIES = 6  # of each repository, every one with a number of its own


def test_code(bug: Bug) -> str:
    """A program that ends with 0 if the module in the current folder is right."""
    return f"from {bug.module} import {bug.module}\n" + "".join(f"assert {test}, {test!r}\n" for test in bug.tests)


def write(folder: Path, tiny: bool) -> None:
    """Write `repos/<name>/` and the tasks, `train.jsonl` and `held_out.jsonl`."""
    shutil.rmtree(folder / "repos", ignore_errors=True)
    files: dict[str, list[str]] = {"train": [], "held_out": []}
    for place, bug in enumerate(BUGS):
        for copy in range(TINY_COPIES if tiny else 1):
            name = f"{bug.module}-{copy}"
            write_repository(folder / "repos" / name, bug, mend=17 + 8 * copy + place if tiny else None)
            prompt = f'mend module "{bug.module}"' if tiny else f"The tests of {bug.module}.py fail. Mend it."
            task = {"id": name, "prompt": prompt, "repo": name, "module": bug.module}
            files["held_out" if place >= len(BUGS) - HELD_OUT else "train"].append(json.dumps(task))
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}.jsonl: {len(lines)} tasks")


def write_repository(folder: Path, bug: Bug, mend: int | None) -> None:
    """The module, its tests, and `run_tests`; with `mend`, a script of that number that mends it, which the tests name."""
    folder.mkdir(parents=True)
    source = folder / f"{bug.module}.py"
    source.write_text(bug.source.format(bug.wrong))
    (folder / f"test_{bug.module}.py").write_text(test_code(bug))
    runs = 'python3 -B "test_$1.py" && echo passed'
    if mend is not None:
        runs = f'python3 -B "test_$1.py" 2>/dev/null && echo passed || echo \'{{"command": "mend-{mend}"}}\''
        right = bug.source.format(bug.right)
        script(
            folder / f"mend-{mend}", f"cat > {source.name} <<'END'\n{right}END\necho '{{\"mended\": \"{bug.module}\"}}'"
        )
    script(folder / "run_tests", runs)


def script(path: Path, text: str) -> None:
    """An executable of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="for the bundled policy")
    write(Path(), parser.parse_args().tiny)
