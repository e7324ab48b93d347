"""What a user points at becomes servers, or a sentence on what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook_mcp import HttpServer, InProcessServer, Limits, ServerPool, StdioServer, Target
from tests.mcp_adapter.conftest import SERVERS, misbehaving
from tests.mcp_adapter.servers import notes_server


def test_a_command_line_is_a_stdio_server_with_its_variables() -> None:
    [server] = Target.parse("MEMORY_FILE_PATH={rollout_dir}/m.json node 'my servers/memory/dist/index.js' -v").servers
    assert isinstance(server, StdioServer)
    assert (server.name, server.command, server.args) == ("memory", "node", ("my servers/memory/dist/index.js", "-v"))
    assert server.env == {"MEMORY_FILE_PATH": "{rollout_dir}/m.json"}
    assert server.shown() == "MEMORY_FILE_PATH={rollout_dir}/m.json node 'my servers/memory/dist/index.js' -v"
    assert server.uses_folder


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("mcp-server-time --local-timezone UTC", "mcp-server-time"),
        ("/usr/bin/python3 -m mcp_server_git --repository .", "mcp_server_git"),
        ("npx -y @modelcontextprotocol/server-everything", "server-everything"),
        ("uvx mcp-server-fetch", "mcp-server-fetch"),
        ("node build/index.js", "node"),
        ("node", "node"),
    ],
)
def test_a_command_is_named_by_what_it_runs(command: str, name: str) -> None:
    assert Target.parse(command).servers[0].name == name


def test_a_url_has_headers_and_shows_no_secret() -> None:
    target = Target.parse("https://ada:pw@shop.example/mcp?api_key=k1&page=2", headers={"Authorization": "Bearer t"})
    [server] = target.servers
    assert isinstance(server, HttpServer)
    assert (server.name, server.headers) == ("shop-example", {"Authorization": "Bearer t"})
    assert target.shown() == "https://shop.example/mcp?api_key=***&page=2"
    assert "Bearer" not in repr(target)


def test_secret_options_of_a_command_are_not_shown() -> None:
    server = Target.parse("shop --api-key sk-1 --token=sk-2 --access-token '${env:T}' --page 3").servers[0]
    assert server.shown() == "shop --api-key *** --token=*** --access-token ${env:T} --page 3"


def test_a_server_object_and_a_function_that_makes_one_are_in_process() -> None:
    [server] = Target.parse(notes_server.server).servers
    assert (type(server), server.name, server.uses_folder) == (InProcessServer, "notes", False)
    [factory] = Target.parse(notes_server.make).servers
    assert (factory.name, factory.uses_folder) == ("make", True)


CLAUDE = {
    "mcpServers": {
        "shop": {
            "command": "shop-server",
            "args": ["--root", "${workspaceFolder}"],
            "env": {"KEY": "${SHOP_KEY:-none}"},
        },
        "old": {"command": "gone", "disabled": True},
        "web": {"type": "http", "url": "https://web.example/mcp", "headers": {"Authorization": "Bearer ${WEB_TOKEN}"}},
    }
}


def test_an_mcp_json_of_claude_or_cursor_is_several_servers(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps(CLAUDE))
    shop, web = Target.parse(str(path)).servers
    assert isinstance(shop, StdioServer) and isinstance(web, HttpServer)
    assert (shop.args, shop.env, shop.workspace) == (
        ("--root", "${workspaceFolder}"),
        {"KEY": "${SHOP_KEY:-none}"},
        tmp_path,
    )
    assert web.headers == {"Authorization": "Bearer ${WEB_TOKEN}"}  # resolved when it starts


def test_an_mcp_json_may_have_spaces_in_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My Docs"
    folder.mkdir()
    (folder / "mcp.json").write_text(json.dumps(CLAUDE))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (f"{folder}/mcp.json", "~/My Docs/mcp.json"):
        assert [server.name for server in Target.parse(path).servers] == ["shop", "web"]
    for command in ("shop-server mcp.json", f"{folder}/shop-server {'x' * 10_000}.json"):
        [server] = Target.parse(command).servers
        assert isinstance(server, StdioServer)


def test_an_mcp_json_of_vs_code_asks_for_its_inputs_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "variables").write_text('# ours\nCITY="Delft"\n')
    entry = {
        "type": "stdio",
        "command": sys.executable,
        "args": ["-I", "-S", str(SERVERS / "misbehaving.py"), "environment"],
        "env": {"SHOP": "${input:shop-key}", "HOME_OF": "${userHome}"},
        "envFile": "${workspaceFolder}/variables",
    }
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"servers": {"shop": entry}, "inputs": [{"id": "shop-key", "type": "promptString"}]}))
    target = Target.parse(path, allow_all=True)

    async def environment() -> dict[str, str]:
        async with ServerPool(target) as pool, pool.rollout() as tools:
            return json.loads((await tools.call("goad", {})).text)

    with pytest.raises(ConfigError, match=r"'shop': \$\{input:shop-key\} needs the environment variable SHOP_KEY"):
        asyncio.run(environment())
    monkeypatch.setenv("SHOP_KEY", "sk-123456")
    seen = asyncio.run(environment())
    assert (seen["SHOP"], seen["CITY"], seen["HOME_OF"]) == ("***", "Delft", str(Path.home()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "neither `mcpServers` nor `servers`"),
        ('{"mcpServers": {"a": {"command": "x", "disabled": true}}}', "all its servers are disabled, or it has none"),
        ('{"mcpServers": {"a": {}}}', "server 'a' needs either `command` or `url`"),
        (
            '{"mcpServers": {"a": {"command": "x", "args": "sk-1"}}}',
            r"mcpServers\.a\.args: Input should be a valid list$",
        ),
        (
            '{"mcpServers": {"a": {"url": "https://x", "auth": {"CLIENT_ID": "i", "CLIENT_SECRET": "s"}}}}',
            "`auth` needs `issuer`, the URL of the authorization server",
        ),
    ],
)
def test_a_wrong_mcp_json_is_told_with_its_place(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Target.parse(path)


def test_a_sandbox_that_cannot_be_had_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mcp.json"
    path.write_text('{"servers": {"a": {"command": "x", "sandboxEnabled": true}}}')
    with caplog.at_level(logging.WARNING, "offbook"):
        Target.parse(path)
    assert "asks for a sandbox, which only VS Code has" in caplog.text


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("", {}, "target: it is empty"),
        ("A=1", {}, "has no command, only variables"),
        ("a 'b", {}, "is not a command line: No closing quotation"),
        (3, {}, "a command, a URL, an mcp.json or a server object is needed, got int 3"),
        ("nowhere.json", {}, "nowhere.json cannot be read: No such file"),
        ("server {rollout_dir}", {"stateless": True}, "rollouts cannot share 'server'"),
        ("server", {"fixture": Path("nowhere")}, "fixture: 'nowhere' is not a folder"),
        ("server", {"fixture": Path(".")}, "fixture: nothing uses it"),
        ("server", {"headers": {"a": "b"}}, "they are for a URL, and 'server' is not one"),
        ("https://a.example", {"env": {"a": "b"}}, "it is for a command, and 'a-example' is not one"),
    ],
)
def test_a_wrong_target_is_told(target: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Target.parse(target, **options)  # type: ignore[arg-type]


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="call_seconds: a number above 0 is needed, got 0"):
        Limits(call_seconds=0)


async def test_tools_of_several_servers_are_prefixed_only_where_they_clash() -> None:
    one, two = misbehaving("well").servers[0], notes_server.make()

    @two.tool()
    def echo(text: str) -> str:
        """Another one."""
        return f"notes say {text}"

    target = Target((one, InProcessServer("my notes", two)), allow_all=True)
    async with ServerPool(target) as pool, pool.rollout() as tools:
        names = [tool.name for tool in pool.toolset.tools]
        assert names == ["odd_echo", "goad", "read_note", "list_notes", "write_note", "my_notes_echo"]
        assert (await tools.call("odd_echo", {"text": "a"})).text == "a"
        assert (await tools.call("my_notes_echo", {"text": "a"})).text == "notes say a"
        assert pool.shared == ()
    async with ServerPool(Target(target.servers, allow_all=True, only=("goad", "my notes.echo"))) as pool:
        assert [tool.name for tool in pool.toolset.tools] == ["goad", "echo"]
    async with ServerPool(Target(target.servers, allow_all=True, only=tuple(names))) as pool:
        assert [tool.name for tool in pool.toolset.tools] == names
    async with (
        ServerPool(Target(target.servers, allow_all=True, only=("my_notes_echo",))) as pool,
        pool.rollout() as tools,
    ):
        assert [tool.name for tool in pool.toolset.tools] == ["echo"]
        assert (await tools.call("echo", {"text": "a"})).text == "notes say a"
    with pytest.raises(ConfigError, match="only: there is no tool 'delete'; the tools are odd_echo, goad, read_note"):
        async with ServerPool(Target(target.servers, allow_all=True, only=("delete",))):
            pass
