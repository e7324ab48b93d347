"""`offbook mcp tools`: what a user sees before anything is trained."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from offbook.base.errors import install_command
from offbook.commands.main import guarded
from offbook_mcp import Limits, Target
from offbook_mcp.commands import app
from offbook_mcp.commands.options import on_target
from tests.mcp_adapter.conftest import SERVERS, python_module
from tests.paths import ROOT

Called = Callable[..., tuple[int, str, str]]
POINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["offbook.commands"]["mcp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry point of the checkout, however old the installed one is, and a server of one's own."""
    folder = tmp_path_factory.mktemp("mcp")
    facts = folder / "plugged-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[offbook.commands]\nmcp = {POINT}\n")
    (folder / "notes_server.py").write_text((SERVERS / "notes_server.py").read_text())
    return folder


def offbook(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "offbook", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_tools_of_a_command_are_listed_as_the_model_will_see_them(folder: Path) -> None:
    done = offbook(folder, "mcp", "tools", python_module("mcp_server_time", "--local-timezone", "UTC"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mcp_server_time: mcp-time 2026.")
    assert lines[1].endswith("; rollouts share one session (every tool is read-only)")
    assert "get_current_time  read    (timezone)" in lines
    assert "convert_time      read    (source_timezone, time, target_timezone)" in lines


@pytest.fixture
def called(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """`called("tools", ...)` -> exit code, stdout, stderr, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

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


def test_options_shape_what_is_listed_and_json_has_the_schemas(folder: Path, called: Called) -> None:
    (folder / "fixture").mkdir(exist_ok=True)
    words = [
        "notes_server:make",
        "--fixture",
        "fixture",
        "--only",
        "write_note",
        "--bind",
        "text=teal",
        "--json",
    ]
    code, page_text, complaint = called("tools", *words)
    assert code == 0, complaint
    page = json.loads(page_text)
    assert [(tool["name"], tool["kind"]) for tool in page["tools"]] == [("write_note", "write")]
    assert page["left_out"] == {"write_note": "it may write; --allow TOOL calls it"}
    assert page["tools"][0]["parameters"] == {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    assert page["shared"] == []
    assert len(page["fingerprint"]) == 16


def test_a_servers_text_reaches_no_terminal_raw(folder: Path, called: Called) -> None:
    (folder / "rude.py").write_text(
        "from mcp.server.mcpserver import MCPServer\nserver = MCPServer('rude\\x1b[2J')\n"
        "@server.tool(description='Hello\\x1b]0;owned\\x07\\u202e')\ndef hi() -> str: return ''\n"
    )
    code, page, complaint = called("tools", "rude:server")
    assert code == 0, complaint
    assert not {"\x1b", "\x07", "\u202e"} & set(page)
    assert r"Hello\x1b]0;owned\x07\u202e" in page


def test_the_deadlines_of_a_start_and_of_a_call_are_options(called: Called) -> None:
    silent = shlex.join([sys.executable, str(SERVERS / "misbehaving.py"), "silent"])
    code, _, complaint = called("tools", silent, "--start-timeout", "0.5")
    assert code == 1
    assert "not ready within start_seconds=0.5; if it needs longer, raise that (--start-timeout): " in complaint
    code, _, complaint = called("tools", silent, "--call-timeout", "0")
    assert (code, "--call-timeout" in complaint) == (2, True)
    targets: list[Target] = []
    command = typer.Typer()
    command.command()(on_target(targets.append))
    command(["server", "--call-timeout", "0.2"], standalone_mode=False)
    command(["server"], standalone_mode=False)
    assert [target.limits for target in targets] == [Limits(call_seconds=0.2, explore_seconds=0.2), Limits()]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("tools nowhere-at-all", 1, "offbook: MCP server 'nowhere-at-all': cannot be started, No such file"),
        ("tools notes_server:nothing", 2, "offbook: target: notes_server has no 'nothing'"),
        ("tools nowhere:server", 2, "offbook: target: there is no module 'nowhere'"),
        ("tools notes_server:Path.home --bind text", 2, "--bind: 'text' is not of the form name=value"),
        ("tools a.json", 2, "a.json cannot be read"),
        ("tools 'server' --fixture .", 2, "offbook: fixture: nothing uses it"),
        ("tools", 2, "Missing argument"),
        ("nothing", 2, "No such command 'nothing'"),
    ],
)
def test_what_is_wrong_is_one_sentence(called: Called, words: str, code: int, message: str) -> None:
    returned, page, complaint = called(*shlex.split(words))
    assert (returned, page) == (code, ""), complaint
    assert message in complaint


def test_the_command_is_listed_without_being_loaded_and_a_missing_extra_is_named(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['offbook', *sys.argv[1:]]\n"
        "sys.modules['mcp'] = None\n"
        "from offbook.commands.main import main; main()"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    for words, returned, text in (("--help", 0, "\n  mcp "), ("mcp tools x", 1, install_command("mcp"))):
        command = [sys.executable, "-c", code, *words.split()]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == returned, done.stderr
        assert text in done.stdout + done.stderr
