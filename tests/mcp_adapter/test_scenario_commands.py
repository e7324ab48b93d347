"""`offbook mcp explore` and `offbook mcp scenarios`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook.commands.main import guarded
from offbook_mcp.commands import app
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.scenario import load_scenarios
from tests.mcp_adapter.conftest import SERVERS

Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """`called("scenarios", ...)` -> exit code, stdout, stderr, in a folder with the library server."""
    (tmp_path / "library_server.py").write_text((SERVERS / "library_server.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = guarded(lambda: app(words))
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield call
    sys.modules.pop("library_server", None)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_exploring_shows_what_a_server_holds_and_none_of_its_escapes(called: Called) -> None:
    code, page, complaint = called("explore", "library_server:make")
    assert code == 0, complaint
    assert "list_books: [].shelf: 4, such as north, south, east" in page
    assert "add_book: it may write; --allow TOOL calls it" in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)


def test_scenarios_are_written_and_counted(called: Called, tmp_path: Path) -> None:
    code, page, complaint = called(
        "scenarios", "library_server:make", "-o", "out/s.jsonl", "--count", "8", "--allow-all"
    )
    assert code == 0, complaint
    scenarios = load_scenarios(tmp_path / "out" / "s.jsonl")
    assert page.startswith(f"8 scenarios: {len(scenarios.train)} to train, {len(scenarios.eval)} held out")
    assert f"written to out/s.jsonl, sha256 {scenarios.digest[:16]}" in page
    assert "dropped: " in page and "valid scenarios" in complaint
    assert not {"\x1b", "\x07", "\u202e"} & set(page + complaint)


STOCK = '''
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("stock", log_level="ERROR")

@server.tool()
def count_item(item: str) -> str:
    """How many of an item are in stock."""
    if item != "zzyzx":
        raise ToolError(f"\\x1b[2Jno such item: {item}")
    return "40"
'''


def test_a_server_that_refuses_every_call_shows_its_error_and_what_to_do(called: Called, tmp_path: Path) -> None:
    (tmp_path / "stock_of_names.py").write_text(STOCK)
    code, page, complaint = called("explore", "stock_of_names:server", "--read-only")
    assert code == 0, complaint
    assert "count_item: 0 answered, 0 empty, " in page
    assert "refused, such as {'item': " in page and "no such item: " in page
    code, _, complaint = called("scenarios", "stock_of_names:server", "--read-only")
    assert code == 2
    assert (
        "\nno call of count_item worked: {'item': " in complaint
        and "ist valid arguments in the tool's schema (`enum`" in complaint
    )
    assert "\x1b" not in page + complaint
    sys.modules.pop("stock_of_names", None)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["scenarios", "library_server:make", "--max-cost", "1"], 2, "they apply to --llm only"),
        (["scenarios", "library_server:make", "--count", "0"], 2, "greater than or equal to 1"),
        (["scenarios", "library_server:make", "--only", "add_book"], 2, "none could be made"),
        (["explore", "library_server:nothing"], 2, "library_server has no 'nothing'"),
    ],
)
def test_what_is_wrong_is_one_sentence(called: Called, words: list[str], code: int, message: str) -> None:
    returned, page, complaint = called(*words)
    assert (returned, page) == (code, ""), complaint
    assert message in complaint
