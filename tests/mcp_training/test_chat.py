"""Talking to a model that has a server's tools."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook import TrainableModel
from offbook.commands.main import guarded
from offbook.testing import ScriptedServer
from offbook_mcp import Limits, ServerPool, Target
from offbook_mcp.commands import app
from offbook_mcp.commands.chat import ChatSession
from offbook_mcp.training.agent_loop import LoopOptions
from tests.mcp_adapter.conftest import SERVERS, children, misbehaving
from tests.mcp_training.order_server import make_server

Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    (tmp_path / "notes_server.py").write_text((SERVERS / "notes_server.py").read_text())
    (tmp_path / "rude.py").write_text(
        "from mcp.server.mcpserver import MCPServer\nserver = MCPServer('rude')\n"
        "@server.tool()\ndef hi() -> str: return '\\x1b[2J[red]gone'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = guarded(lambda: app(words))
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield call
    for name in ("notes_server", "rude"):
        sys.modules.pop(name, None)


async def test_a_conversation_goes_on_with_the_same_server(stand_in: TrainableModel) -> None:
    await stand_in.register()
    async with ServerPool(Target.parse(make_server())) as pool:
        talk = ChatSession("step 0", stand_in, pool, LoopOptions(), 1_000, pool.toolset)
        first = await talk.ask('order_status(order="4000")')
        second = await talk.ask("thanks")
        talk.release()
    assert first[0] == '-> order_status {"order":"4000"}' or first[0].startswith("-> order_status")
    assert "order 4000 is" in first[1]
    assert first[2].startswith("the tools said order 4000 is")
    assert second == ["heard: thanks"]
    assert [message["role"] for message in talk.history.messages()].count("user") == 2


async def test_a_server_that_fails_is_told_and_replaced(stand_in: TrainableModel) -> None:
    await stand_in.register()
    async with ServerPool(misbehaving("die", limits=Limits(start_seconds=20, call_seconds=5)), ahead=0) as pool:
        talk = ChatSession("step 0", stand_in, pool, LoopOptions(), 1_000, pool.toolset)
        failed = await talk.ask("goad()")
        assert any("the process ended (exit code 3)" in line for line in failed)
        assert failed[-1] == "! the server is started anew"
        assert (await talk.ask('echo(text="teal")'))[-1] == "the tools said teal"
        talk.release()
    assert children() == set()


def test_questions_of_the_command_line_are_answered_beside_step_0(called: Called, obedient: ScriptedServer) -> None:
    words = ["--url", obedient.url, "--compare", "--ask", "list_notes()"]
    code, page, complaint = called("chat", "notes_server:make", *words)
    assert code == 0, complaint
    assert page.count("-> list_notes {}") == 2
    assert "notes-server" not in complaint
    assert "at step 0" in complaint
    assert "untrained" in complaint


def test_what_is_piped_in_is_asked_line_by_line(
    called: Called, obedient: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nagain\n"))
    code, page, complaint = called("chat", "notes_server:make", "--url", obedient.url)
    assert code == 0, complaint
    assert [line.strip() for line in page.splitlines() if line.strip()] == ["heard: hello", "heard: again"]


def test_neither_escapes_nor_markup_of_a_server_are_obeyed(called: Called, obedient: ScriptedServer) -> None:
    code, page, complaint = called("chat", "rude:server", "--url", obedient.url, "--ask", "hi()", "--allow", "hi")
    assert code == 0, complaint
    assert "\x1b" not in page
    assert r"\x1b[2J[red]gone" in page
