"""`offbook runs` and `show`, over a directory on which a server may run; records that are only read."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from offbook.base.console import Terminal
from offbook.base.errors import ConfigError, StoreError
from offbook.base.terminal import echo
from offbook.base.types import new_id
from offbook.commands import main as cli
from offbook.commands.main import app
from offbook.commands.main import run as main
from offbook.server.records.database import open_records
from offbook.server.records.tables import meta
from tests.fakes.finished import finish, record, trained
from tests.fakes.gateway import Gateway
from tests.paths import ROOT


@pytest.fixture
async def folder(gateway: Gateway, tmp_path: Path) -> Path:
    """The directory of a server that is still running."""
    answer = await gateway.chat({"x-offbook-trajectory": "rollout-1"})
    assert answer.status_code == 200
    error = {"type": "ToolError", "message": "shut", "traceback": "Traceback: the till is [red]shut[/red]"}
    await finish(gateway, record("rollout-1", 0.5), record("rollout-2", None, exception=error))
    return tmp_path


async def test_runs_are_listed_and_given_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await asyncio.to_thread(main, ["runs", "--dir", str(folder)])
    assert "run-1" in capsys.readouterr().out
    await asyncio.to_thread(main, ["runs", "--dir", str(folder), "--json"])
    [run] = json.loads(capsys.readouterr().out)
    assert run["run"] == "run-1" and run["rollouts"] == 2


async def test_a_run_and_a_rollout_are_shown_with_markup_as_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["show", "run-1", "--dir", str(folder)]) == 0
    assert "2 rollouts" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["show", "rollout-1", "--dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "reward 0.500" in shown and "user: hi" in shown and "call 1: default at step 0" in shown
    assert await asyncio.to_thread(main, ["show", "rollout-2", "--dir", str(folder)]) == 0
    assert "[red]shut[/red]" in capsys.readouterr().out


async def test_a_tools_text_cannot_steer_the_terminal(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "a", "content": "\x1b[2Jdone\x9b1m"}]
    answer = await gateway.chat({"x-offbook-trajectory": "rollout-1"}, messages=asked)
    assert answer.status_code == 200
    error = {"type": "ToolError", "message": "shut", "traceback": "\x1b]0;owned\x07"}
    await finish(gateway, record("rollout-1", None, exception=error))
    assert await asyncio.to_thread(main, ["show", "rollout-1", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2Jdone\\x9b1m" in shown and "\\x1b]0;owned\\x07" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


async def test_names_ids_metrics_and_warnings_cannot_steer_the_terminal(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b]0;owned\x07\x9b2J\u202e"
    place = {"run": f"run{bad}", "split": f"split{bad}", "scenario": f"task{bad}", "step": 0}
    exception = {"type": f"Error{bad}", "message": bad, "traceback": bad}
    told = {"metrics": {f"metric{bad}": 1.0}, "logs": [f"log{bad}"], "place": place, "model": f"model{bad}"}
    await finish(gateway, record(f"id{bad}", 0.5, **told), record("b", None, exception=exception, **told))
    for words in (["runs"], ["show", place["run"]], ["show", f"id{bad}"], ["show", "b"], ["show", f"none{bad}"]):
        await asyncio.to_thread(cli.guarded, partial(app, [*words, "--dir", str(tmp_path)], standalone_mode=False))
        shown = "".join(capsys.readouterr())
        assert "owned" in shown and not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown), words


_OTHER_WAYS = {
    *("print", "rich.print", "rich.get_console", "Console(", "rich.console.Console("),
    *("typer.echo", "typer.secho", "click.echo", "click.secho", "sys.stdout.write"),
}


def other_ways(code: str) -> set[str]:
    """Where `code` prints without escaping, as `name:line`."""
    if not any(way.rstrip("(").rpartition(".")[2] in code for way in _OTHER_WAYS):
        return set()
    tree = ast.walk(ast.parse(code))
    found = {(n.func if isinstance(n, ast.Call) else n, "(" * isinstance(n, ast.Call)) for n in tree}
    return {
        f"{text}:{n.lineno}"
        for n, call in found
        if isinstance(n, (ast.Name, ast.Attribute)) and (text := ast.unparse(n) + call) in _OTHER_WAYS
    }


def test_every_console_is_the_one_that_escapes_foreign_text() -> None:
    """The engine's processes write their logs with print."""
    assert other_ways("say = print\nConsole()\ntyper.echo(1)") == {"print:1", "Console(:2", "typer.echo:3"}
    files = [file for folder in ("src", "integrations") for file in (ROOT / folder).rglob("*.py")]
    foreign = [file for file in files if "engine" not in file.parts and file.name != "terminal.py"]
    own = {file.name: ways for file in foreign if (ways := other_ways(file.read_text("utf-8")))}
    assert len(foreign) > 300 and not own, "use Terminal or echo of offbook.base.terminal instead"


def test_echo_escapes_control_and_format_characters(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\x1b[2J\x9b\u202e\n", nl=False)
    echo("b\x07", err=True)
    assert capsys.readouterr() == ("a\\x1b[2J\\x9b\\u202e\n", "b\\x07\n")


LISTS = (
    ["runs"],
    ["runs", "--json"],
    ["show", "run-ł"],
    ["show", "rollout-✓"],
    ["show", "rollout-é"],
)


@pytest.fixture
async def foreign_letters(gateway: Gateway, tmp_path: Path) -> Path:
    """The directory of a server with letters of several alphabets in everything that people name."""
    place = {"run": "run-ł", "split": "train", "scenario": "Zoë 人", "step": 0}
    error = {"type": "Fehler", "message": "nö ✓ 人 😀", "traceback": "nö ✓ 人 😀"}
    await finish(
        gateway, record("rollout-✓", 0.5, place=place), record("rollout-é", None, exception=error, place=place)
    )
    return tmp_path


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "cp437", "utf-8"])
async def test_a_list_is_printed_in_every_encoding(
    encoding: str, foreign_letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in LISTS:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        assert await asyncio.to_thread(main, [*words, "--dir", str(foreign_letters)]) == 0, words
        shown = written.getvalue().decode(encoding)
        assert "run-" in shown or "rollout" in shown, words
        if "--json" in words:
            json.loads(shown)
        if words == ["runs", "--json"]:
            assert json.loads(shown)[0]["run"] == "run-ł"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_the_command_prints_to_ascii_and_to_readers_that_go_away(foreign_letters: Path) -> None:
    def offbook(redirected: str, *words: str) -> tuple[int, str, str]:
        line = f"set -o pipefail; {sys.executable} -m offbook {' '.join(words)} {redirected}"
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=240, check=False)
        return done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii")

    where = ("--dir", str(foreign_letters))
    listed, gone, closed, full = await asyncio.gather(
        asyncio.to_thread(offbook, "", "runs", *where),
        asyncio.to_thread(offbook, "| sleep 0", "show", "rollout-✓", *where),
        asyncio.to_thread(offbook, ">&-", "runs", *where),
        asyncio.to_thread(offbook, ">/dev/full", "runs", *where),
    )
    assert listed[0] == 0 and "run-\\u0142" in listed[1] and not listed[2]
    assert gone == closed == (0, "", "")
    assert full[:2] == (1, "") and "output could not be written: [Errno 28] No space left on device" in full[2]


def test_a_run_goes_on_whatever_its_stdout_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    closed = io.TextIOWrapper(io.BytesIO(), "ascii")
    closed.close()
    monkeypatch.setattr("offbook.base.terminal._unwritten", [])
    with os.fdopen(writing, "wb", 0) as unread:
        for stream in (io.TextIOWrapper(unread, "ascii", write_through=True), closed, None):
            monkeypatch.setattr(sys, "stdout", stream)
            Terminal().print("step 1 ✓")
            echo("step 1 ✓")
    assert [line for line in caplog.messages if "output could not be written" in line] == [
        "output could not be written: I/O operation on closed file."
    ]


async def test_an_unknown_name_is_answered_with_the_command_that_lists_them(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no run and no trajectory 'run-11' in .*; `offbook runs` lists the runs"
    ):
        await asyncio.to_thread(partial(app, standalone_mode=False), ["show", "run-11", "--dir", str(folder)])


async def test_a_folder_that_is_no_servers_says_where_one_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        open_records(tmp_path / "nowhere")
    around = tmp_path / "around"
    around.mkdir()
    (around / "server").symlink_to(folder)
    with pytest.raises(ConfigError, match=f"there are records in {around / 'server'}"):
        open_records(around)


async def test_records_that_are_only_read_cannot_be_written_beside_a_server(folder: Path, gateway: Gateway) -> None:
    records = open_records(folder)
    await finish(gateway, record("rollout-3"))
    assert await records.read(lambda connection: connection.scalar(sa.text("SELECT count(*) FROM trajectories"))) == 3
    with pytest.raises(StoreError, match="readonly"):
        await records.read(lambda connection: connection.execute(sa.delete(meta)))
    records.close()


@pytest.mark.parametrize("width", [20, 80, 200])
async def test_the_id_of_a_run_is_on_one_line_at_any_width(
    width: int, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_id("run")
    await finish(gateway, record("rollout-1", 0.5, model="a-model-with-quite-a-long-name", place={"run": run}))
    monkeypatch.setenv("COLUMNS", str(width))
    await asyncio.to_thread(main, ["runs", "--dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert run in shown
    assert ("evaluation" in shown) == (width == 200)
    assert all(len(line) <= max(width, 80) for line in shown.splitlines())


@pytest.mark.parametrize("width", [80, 120])
async def test_no_heading_or_number_of_a_step_is_cut(
    width: int, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    await trained(gateway, "run-1", 0, (0.0, 1.0))
    assert await asyncio.to_thread(main, ["show", "run-1", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {"step", "reward", "groups trained", "taught"} <= set(re.split(r"\s{2,}", shown))
    assert ("tree saves" in shown) == (width == 120)
