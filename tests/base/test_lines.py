"""Lines of streams and of files end with a newline: a text may hold U+2028, U+2029, U+0085 and other separators."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.base.server_sent_events import EventReader, event
from tests.paths import ROOT

SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
READERS = ("src", "integrations", "examples", "benchmarks", "tests/campaign")
READS = {"read_text", "read_bytes", "open", "read", "model_validate_json", "validate_json", "loads"}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_event_with_any_separator_in_its_text_is_one_event(size: int) -> None:
    stream = event(SEPARATORS.encode()) + event(b"{}")
    reader = EventReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [data for piece in pieces for data in reader.push(piece)] == [SEPARATORS.encode(), b"{}"]


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_no_reader_of_a_stream_or_a_file_splits_at_unicodes_separators() -> None:
    files = [file for folder in READERS for file in sorted((ROOT / folder).rglob("*.py"))]
    faults = [fault for file in files if not file.name.startswith("test_") for fault in _faults(file)]
    assert len(files) > 300 and not faults, "split at b'\\n' or '\\n', or use EventReader: " + ", ".join(faults)


def _faults(file: Path) -> Iterator[str]:
    """Uses of httpx's line iterators, and of `splitlines` in a function that reads a file or parses JSON."""
    for function in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
            reads = any(node.attr in READS for node in named)
            for node in named:
                if node.attr in ("aiter_lines", "iter_lines") or (node.attr == "splitlines" and reads):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}"
