"""A server of one's own with plain tools: what is called without leave, what is asked about, and what is remembered."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook.base.errors import ConfigError
from offbook.commands.main import guarded
from offbook_mcp import ServerPool, Target, ToolKind
from offbook_mcp.commands import app
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.files import load_scenarios
from offbook_mcp.scenarios.generate import generate_scenarios
from tests.mcp_adapter.conftest import SERVERS

Called = Callable[..., tuple[int, str, str]]
REMEMBERED = Path(".offbook/mcp/permissions.json")
PLAIN = ("people", "department", "desk", "headcount")


class Terminal(io.StringIO):
    """Somebody at a terminal, who types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """`called("scenarios", ..., typed="y\\n")` -> exit code, stdout, stderr, in a folder with the plain server."""
    (tmp_path / "plain_server.py").write_text((SERVERS / "plain_server.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)

    def call(*words: str, typed: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        try:
            code = guarded(lambda: app(words))
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield call
    sys.modules.pop("plain_server", None)


def test_without_a_terminal_the_tools_and_the_remedy_are_named_at_once(called: Called) -> None:
    code, page, complaint = called("scenarios", "plain_server:server")
    assert (code, page) == (2, "")
    [first, *_] = complaint.splitlines()
    assert (
        first
        == f"not used: {', '.join(PLAIN)}: nothing says that it only reads; if it does, --allow TOOL uses it; if it writes, --allow-writes"
    )
    assert "scenarios: none could be made for staff" in complaint
    assert not REMEMBERED.exists()


def test_one_question_is_enough_and_is_remembered(called: Called) -> None:
    code, page, complaint = called("scenarios", "plain_server:server", "--count", "16", typed="everything\nyes\n")
    assert code == 0, complaint
    assert "department(person)  Somebody's department." in complaint
    assert "There is no 'everything' among them." in complaint
    assert page.startswith("16 scenarios: ")
    assert {name for scenario in load_scenarios("scenarios.jsonl").scenarios for name in scenario.tools} >= {"desk"}
    kept = json.loads(REMEMBERED.read_text())
    assert {each["tool"]: each["allowed"] for each in kept.values()} == dict.fromkeys(PLAIN, True)
    code, _, complaint = called("scenarios", "plain_server:server", "--count", "16", typed="")
    assert code == 0
    assert "Do they only read?" not in complaint


def test_of_the_tools_asked_about_some_may_be_allowed(called: Called) -> None:
    code, page, complaint = called("scenarios", "plain_server:server", "--count", "12", typed="people, desk\n")
    assert code == 0, complaint
    assert {name for scenario in load_scenarios("scenarios.jsonl").scenarios for name in scenario.tools} == {
        "people",
        "desk",
    }
    code, page, complaint = called("explore", "plain_server:server", typed="")
    assert "headcount: denied before; --allow TOOL permits it again" in page


def test_flags_allow_and_deny_without_a_terminal_and_are_remembered(called: Called) -> None:
    allowed = [word for name in PLAIN[:3] for word in ("--allow", name)]
    code, page, complaint = called("scenarios", "plain_server:server", "--count", "12", *allowed)
    assert code == 0, complaint
    assert (
        "not used: headcount: nothing says that it only reads; if it does, --allow TOOL uses it; if it writes, --allow-writes"
        in complaint
    )
    code, page, _ = called("explore", "plain_server:server", "--deny", "desk")
    assert "department: " in page and "\ndesk: " not in page
    assert "desk: denied before; --allow TOOL permits it again" in page
    code, page, said = called("tools", "plain_server:server", "--allow", "desk")
    assert said.startswith("remembered until the tool changes: desk may be called (")
    assert "headcount   unknown" in page and "desk        read" in page
    assert called("explore", "plain_server:server", "--allow", "desk", "--deny", "desk")[0] == 2
    assert "allow: there is no tool 'nothing'" in called("explore", "plain_server:server", "--allow", "nothing")[2]


def test_a_tool_that_changes_is_asked_about_again(called: Called, tmp_path: Path) -> None:
    assert called("explore", "plain_server:server", typed="y\n")[0] == 0
    changed = (tmp_path / "plain_server.py").read_text().replace("Somebody's desk.", "Somebody's place.")
    (tmp_path / "plain_server.py").write_text(changed)
    sys.modules.pop("plain_server")
    _, _, complaint = called("explore", "plain_server:server", typed="n\n")
    assert complaint.count("(person)") == 1
    assert "Somebody's place." in complaint


def test_nothing_is_asked_where_nothing_is_called(called: Called) -> None:
    for words in (["tools"], ["scenarios", "--dry-run"], ["train", "--dry-run", "--dir", "here"]):
        code, _, complaint = called(words[0], "plain_server:server", *words[1:], typed="")
        assert code == 0, complaint
        assert "Do they only read?" not in complaint
    assert not REMEMBERED.exists()


@pytest.mark.parametrize("variable", [None, "own"])
def test_a_server_object_in_this_process_logs_to_a_file(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("OFFBOOK_DIR", variable)
    code, _, complaint = called("explore", "plain_server:server", typed="y\n")
    assert code == 0
    assert "Processing request" not in complaint
    folder = tmp_path / (variable or ".offbook")
    assert (folder / "mcp" / "permissions.json").exists()
    file = folder / "logs" / "mcp.log"
    assert complaint.endswith(f"log records are in {file}\n")
    assert "mcp.server" in file.read_text()
    assert not any(type(handler).__name__ == "TargetLog" for handler in logging.getLogger().handlers)


def office() -> MCPServer:
    """A tool that reads, one that writes, and one of which nobody can tell."""
    server = MCPServer("office")
    for name in ("list_rooms", "book_room", "cancel_booking"):
        server.add_tool(lambda: "done", name=name, description="A tool.")
    return server


async def test_an_allowed_tool_of_unknown_kind_reads_and_an_allowed_writer_stays_one() -> None:
    async with ServerPool(Target.parse(office(), allow=("book_room", "cancel_booking"))) as pool:
        kinds = {tool.name: (tool.tool.kind, tool.tool.allowed) for tool in pool.toolset.tools}
    assert kinds == {
        "list_rooms": (ToolKind.READ, False),
        "book_room": (ToolKind.READ, False),
        "cancel_booking": (ToolKind.WRITE, True),
    }


async def test_denying_every_tool_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tools: list_rooms, book_room, cancel_booking may not be called"):
        async with ServerPool(Target.parse(office(), deny=("list_rooms", "book_room", "cancel_booking"))):
            pass


def lamp() -> str:
    """The status of the lamp."""
    return "it is on"


def lamps(room: Literal["hall", "loft", "shed", "barn", "attic", "cellar"]) -> str:
    """The status of the lamp of a room."""
    return f"the lamp of the {room} is on"


@pytest.mark.parametrize(
    ("status", "found", "fewer"),
    [(lamp, "only 1 of 48, of which none", False), (lamps, "only 6 of 48 could", True)],
)
async def test_far_too_few_scenarios_end_it_with_reasons_and_remedies(
    status: Callable[..., str], found: str, fewer: bool
) -> None:
    server = MCPServer("lamp")
    server.add_tool(status, annotations=READS)
    server.add_tool(lambda: "off", name="toggle_lamp", description="Toggles it.")
    said: list[str] = []
    with pytest.raises(ConfigError) as raised:
        await generate_scenarios(server, count=48, max_difficulty=2, progress=said.append)
    assert said[0] == "not used: toggle_lamp: it may write; --allow-writes uses it"
    message = str(raised.value)
    assert f"scenarios: {found}" in message
    assert "not used: toggle_lamp: it may write; --allow-writes uses it" in message
    assert ("or ask for fewer: --count 6" in message) is fewer


READS = ToolAnnotations(read_only_hint=True)


async def test_a_tool_without_a_scenario_is_named() -> None:
    server = MCPServer("shop")

    @server.tool(annotations=READS)
    def list_items() -> list[str]:
        """The items of the shop."""
        return ["lamp", "desk", "rug", "vase", "clock", "shelf", "chair", "bench"]

    @server.tool(annotations=READS)
    def item_stock(item: str) -> int:
        """How many of an item are in stock."""
        return len(item)

    @server.tool(annotations=READS)
    def voucher(code: str) -> str:
        """What a voucher is worth."""
        raise ValueError(code)

    said: list[str] = []
    await generate_scenarios(server, count=12, progress=said.append)
    [line] = [line for line in said if line.startswith("no scenario: ")]
    assert line.startswith("no scenario: voucher: no call of it worked: {'code': ")
