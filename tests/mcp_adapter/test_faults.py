"""What goes wrong with a server ends as an error of ours that says what, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbook_mcp import (
    Limits,
    McpConnectionError,
    McpOverflowError,
    McpProtocolError,
    McpServerError,
    McpStartError,
    McpTimeoutError,
    McpToolsChangedError,
    ServerPool,
    StdioServer,
    Target,
)
from tests.mcp_adapter.conftest import SERVERS, children, misbehaving

QUICK = Limits(start_seconds=20, call_seconds=2)


async def goaded(mode: str, limits: Limits = QUICK) -> str:
    """What the misbehaving tool answers."""
    async with ServerPool(misbehaving(mode, limits=limits), ahead=0) as pool, pool.rollout() as tools:
        return (await tools.call("goad", {})).text


async def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(McpStartError, match=r"'nowhere-at-all': cannot be started, No such file or directory"):
        async with ServerPool(Target.parse("nowhere-at-all --now")):
            pass


async def test_a_script_without_its_interpreter_is_told_to_name_one() -> None:
    with pytest.raises(McpStartError, match=r'a script needs its interpreter in front, as in "python stock\.py"'):
        async with ServerPool(Target.parse("stock.py")):
            pass


async def test_a_server_that_exits_at_once_is_told_with_its_code_and_last_words() -> None:
    with pytest.raises(McpStartError) as told:
        await goaded("exit")
    assert "the process ended (exit code 4)" in str(told.value)
    assert r"no licence \x1b[31mfound\x1b[0m" in str(told.value)  # its colours do not reach our terminal
    assert children() == set()


async def test_a_server_that_never_answers_is_given_up_after_the_start_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(McpStartError, match=r"was not ready within start_seconds=0\.5"):
        await goaded("silent", Limits(start_seconds=0.5))
    assert time.monotonic() - start < 8
    assert children() == set()


async def test_a_server_that_prints_to_stdout_works_and_the_line_is_told_when_it_does_not() -> None:
    assert await goaded("chatty") == "well"
    target = Target(
        (StdioServer("odd", sys.executable, ("-c", "print('Usage: odd'); input()")),), limits=QUICK, allow_all=True
    )
    with pytest.raises(McpStartError, match="lines that are not MCP messages, such as 'Usage: odd'"):
        async with ServerPool(Target(target.servers, limits=Limits(start_seconds=1))):
            pass


async def test_a_server_that_dies_in_a_call_is_told_with_its_last_words() -> None:
    with pytest.raises(McpConnectionError) as told:
        await goaded("die")
    assert "the process ended (exit code 3), during the call of 'goad'" in str(told.value)
    assert "the tool has failed badly" in str(told.value)
    assert isinstance(told.value, ConnectionError)


async def test_a_call_that_hangs_ends_at_its_deadline() -> None:
    start = time.monotonic()
    remedy = r"within call_seconds=0\.5; if it needs longer, raise that \(--call-timeout\)"
    with pytest.raises(McpTimeoutError, match=f"no answer to the call of 'goad' {remedy}"):
        await goaded("hang", Limits(call_seconds=0.5))
    assert time.monotonic() - start < 8


async def test_an_answer_that_is_not_json_ends_the_session_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(McpProtocolError, match=r"a message that is not valid JSON-RPC: '\{\"jsonrpc\""):
        await goaded("garbled", Limits(call_seconds=30))
    assert time.monotonic() - start < 15


async def test_an_answer_of_another_shape_is_an_error_of_the_protocol() -> None:
    with pytest.raises(McpProtocolError, match="the call of 'goad': its answer is not valid MCP"):
        await goaded("shapeless")


@pytest.mark.parametrize("mode", ["flood-answer", "flood-endless-line", "flood-notifications", "flood-noise"])
async def test_a_flood_is_refused(mode: str) -> None:
    with pytest.raises(McpOverflowError, match="more than message_bytes=1,000,000 without an answer"):
        await goaded(mode, Limits(call_seconds=30, message_bytes=1_000_000))
    assert children() == set()


MEASURED = """
import asyncio, resource, sys
from offbook_mcp import *

async def peak_growth(mode):
    server = StdioServer("odd", sys.executable, ("-I", "-S", sys.argv[1], mode))
    async with ServerPool(Target((server,), allow_all=True, limits=Limits(message_bytes=2_000_000)), ahead=0) as pool:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(2):
            async with pool.rollout() as tools:
                try:
                    told = (await tools.call("goad", {})).text
                except McpOverflowError:
                    told = "refused"
        print(mode, told, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sep=",")

for mode in ("flood-stderr", "flood-notifications", "flood-answer"):
    asyncio.run(peak_growth(mode))
"""


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_fifty_megabytes_take_no_such_memory() -> None:
    words = [sys.executable, "-c", MEASURED, str(SERVERS / "misbehaving.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    measured = [line.split(",") for line in done.stdout.splitlines()]
    assert [told for _, told, _ in measured] == ["quiet again", "refused", "refused"]
    for mode, _, kilobytes in measured:  # a line of up to 2 MB is held, and held again while it is cut
        assert int(kilobytes) < 20_000, mode


async def test_a_session_with_other_tools_than_the_first_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "moody.py"
    source = (SERVERS / "misbehaving.py").read_text()
    script.write_text(source.replace("changed = False", f"changed = os.path.exists({str(tmp_path / 'moved')!r})"))
    server = StdioServer("odd", sys.executable, ("-I", "-S", str(script)))
    async with ServerPool(Target((server,), allow_all=True), ahead=0) as pool:
        async with pool.rollout():
            (tmp_path / "moved").touch()
        with pytest.raises(McpToolsChangedError, match="a new session has another echo, or none"):
            async with pool.rollout():
                pass


async def test_a_shared_server_that_died_is_started_again_for_the_next_rollout() -> None:
    async with ServerPool(misbehaving("die", limits=QUICK, stateless=True)) as pool:
        for _ in range(2):
            async with pool.rollout() as tools:
                assert (await tools.call("echo", {"text": "alive"})).text == "alive"
                with pytest.raises(McpConnectionError):
                    await tools.call("goad", {})
                with pytest.raises(McpConnectionError, match="the process ended"):
                    await tools.call("echo", {"text": "still?"})


async def test_a_cancelled_call_leaves_the_session_usable() -> None:
    async with ServerPool(misbehaving("hang", stateless=True)) as pool, pool.rollout() as tools:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools.call("goad", {}), 0.3)
        assert (await tools.call("echo", {"text": "still here"})).text == "still here"


async def test_a_cancelled_start_leaves_nothing() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            async with ServerPool(misbehaving("silent")):
                pass
    assert children() == set()


async def test_every_fault_is_one_kind_of_error_and_names_the_server() -> None:
    with pytest.raises(McpServerError) as told:
        await goaded("die")
    assert told.value.server == "odd"
    assert str(told.value).startswith("MCP server 'odd': ")


async def test_the_secrets_of_a_server_are_in_no_message_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "sk-very-secret")
    command = (sys.executable, "-I", "-S", str(SERVERS / "misbehaving.py"))
    env = {"API_KEY": "${env:SHOP_TOKEN}", "PASSWORD": "hunter-two", "COLOUR": "turquoise"}
    server = StdioServer("odd", command[0], (*command[1:], "environment"), env)
    assert "sk-very" not in repr(server) and "hunter" not in repr(server)
    assert server.shown().startswith("API_KEY=${env:SHOP_TOKEN} PASSWORD=*** COLOUR=***")
    async with ServerPool(Target((server,), allow_all=True)) as pool, pool.rollout() as tools:
        shown = json.loads((await tools.call("goad", {})).text)
    assert (shown["API_KEY"], shown["PASSWORD"], shown["COLOUR"]) == ("***", "***", "turquoise")


@pytest.mark.parametrize(("mode", "text"), [("own-error", "no such row"), ("own-timeout", "the database timed out")])
async def test_an_error_of_the_server_with_a_code_of_the_sdk_is_an_answer(mode: str, text: str) -> None:
    async with ServerPool(misbehaving(mode, limits=QUICK), ahead=0) as pool, pool.rollout() as tools:
        answer = await tools.call("goad", {})
        assert (answer.text, answer.is_error) == (text, True)
        assert (await tools.call("echo", {"text": "still here"})).text == "still here"


async def test_tools_with_a_faulty_schema_are_left_out_by_name() -> None:
    async with ServerPool(misbehaving("bad-schema", limits=QUICK), ahead=0) as pool, pool.rollout() as tools:
        assert [tool.name for tool in pool.toolset.tools] == ["echo", "goad"]
        assert pool.toolset.left_out == {
            "typeless": 'its definition is faulty: inputSchema needs "type": "object"',
            "listed": "its definition is faulty: inputSchema: Input should be a valid dictionary",
        }
        assert (await tools.call("echo", {"text": "here"})).text == "here"


async def test_a_server_of_sdk_1_is_told_to_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("from mcp.server.fastmcp import FastMCP\n")
    with pytest.raises(McpStartError, match=r'with "mcp<2", and name the interpreter there'):
        async with ServerPool(Target.parse(f"{sys.executable} {tmp_path / 'server.py'}")):
            pass
