"""The same tools in a LangGraph app: in any loop, sync, and with servers of its own in each rollout."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI

from offbook import RemoteBackend, TrainableModel, Trajectory
from offbook.base.errors import ConfigError, install_command
from offbook.client.rollouts.capture import capturing
from offbook.testing import scripted_server
from offbook_langgraph import trainable
from offbook_mcp import McpConnectionError, mcp_tools
from tests.fakes.obedient_policy import obey
from tests.mcp_adapter.conftest import children, misbehaving, python_module
from tests.mcp_adapter.servers import notes_server


def named(tools: list[Any]) -> dict[str, Any]:
    return {tool.name: tool for tool in tools}


def test_tools_opened_in_one_loop_work_in_another_and_without_one() -> None:
    tools = asyncio.run(mcp_tools(misbehaving("well")))
    echo = named(tools)["echo"]
    assert echo.args_schema == {"type": "object", "properties": {"text": {"type": "string"}}}
    assert asyncio.run(echo.ainvoke({"text": "a"})) == "a"
    assert echo.invoke({"text": "b"}) == "b"
    tools.close()
    tools.close()
    with pytest.raises(RuntimeError, match="these MCP tools are closed"):
        echo.invoke({"text": "c"})
    assert children() == set()


async def test_what_a_tool_reports_is_read_by_the_model_and_what_a_server_does_is_raised() -> None:
    async with await mcp_tools(notes_server.make()) as tools:
        call = {"type": "tool_call", "id": "1", "name": "read_note", "args": {"name": "none"}}
        message = await named(tools)["read_note"].ainvoke(call)
        assert isinstance(message, ToolMessage)
        assert (message.status, message.content) == ("error", "Error executing tool read_note")
    async with await mcp_tools(misbehaving("die")) as tools:
        with pytest.raises(McpConnectionError):
            await named(tools)["goad"].ainvoke({})


async def test_arguments_may_have_any_name() -> None:
    server = notes_server.make()

    @server.tool()
    def odd(config: str, run_manager: str, callbacks: str, self_: str) -> str:
        """Arguments that LangChain uses itself."""
        return config + run_manager + callbacks + self_

    async with await mcp_tools(server) as tools:
        arguments = {"config": "a", "run_manager": "b", "callbacks": "c", "self_": "d"}
        assert await named(tools)["odd"].ainvoke(arguments) == "abcd"


async def test_each_capture_has_servers_of_its_own_until_it_ends(tmp_path: Path) -> None:
    async with await mcp_tools(notes_server.make, fixture=tmp_path, max_rollouts=2) as tools:
        write, listed = named(tools)["write_note"], named(tools)["list_notes"]

        async def rollout(number: int) -> str:
            with capturing(Trajectory()), capturing(Trajectory()):
                await write.ainvoke({"name": f"n{number}", "text": "a"})
                return await listed.ainvoke({})

        for _ in range(3):  # a slot that was not given back would stop the second round
            answers = await asyncio.wait_for(asyncio.gather(*(rollout(number) for number in range(4))), 30)
            assert answers == ['["n0"]', '["n1"]', '["n2"]', '["n3"]']
        trajectory = Trajectory()
        with capturing(trajectory):
            with capturing(trajectory):
                await write.ainvoke({"name": "inner", "text": "a"})
            assert await listed.ainvoke({}) == '["inner"]'  # the rollout goes on
        assert await listed.ainvoke({}) == "[]"


async def test_calls_outside_of_rollouts_take_no_rollouts_place(tmp_path: Path) -> None:
    async with await mcp_tools(notes_server.make, fixture=tmp_path, max_rollouts=1) as tools:
        write, listed = named(tools)["write_note"], named(tools)["list_notes"]

        async def rollout(number: int) -> str:
            with capturing(Trajectory()):
                await write.ainvoke({"name": f"n{number}", "text": "a"})
                return await listed.ainvoke({})

        await write.ainvoke({"name": "outside", "text": "a"})
        answers = await asyncio.wait_for(asyncio.gather(*(rollout(number) for number in range(3))), 30)
        assert answers == ['["n0"]', '["n1"]', '["n2"]']
        assert await listed.ainvoke({}) == '["outside"]'


async def test_at_most_max_rollouts_have_servers_at_a_time(tmp_path: Path) -> None:
    async with await mcp_tools(notes_server.make, fixture=tmp_path, max_rollouts=1) as tools:
        listed = named(tools)["list_notes"]
        with capturing(Trajectory()):
            await listed.ainvoke({})
            with capturing(Trajectory()), pytest.raises(TimeoutError):
                await asyncio.wait_for(listed.ainvoke({}), 0.5)
            assert await asyncio.wait_for(asyncio.to_thread(Context().run, listed.invoke, {}), 30) == "[]"
    with pytest.raises(ConfigError, match="max_rollouts: at least 1 is needed, got 0"):
        await mcp_tools(notes_server.make, max_rollouts=0)


async def test_a_langgraph_app_runs_on_them_inside_trainable(tmp_path: Path) -> None:
    (tmp_path / "fixture").mkdir()
    with scripted_server(obey, tmp_path) as gateway:
        model = TrainableModel(name="mcp", base_model="tiny", backend=RemoteBackend(gateway.url))
        async with await mcp_tools(notes_server.make, fixture=tmp_path / "fixture") as tools:
            app = create_agent(ChatOpenAI(model="gpt-4.1-mini", api_key="unused"), list(tools))  # type: ignore[arg-type]

            @trainable(model=model)
            async def agent(scenario: dict[str, Any]) -> float:
                order = f"write_note(name={scenario['name']!r}, text='teal') then list_notes()"
                state = await app.ainvoke({"messages": [("user", order)]})  # type: ignore[arg-type]
                return float(state["messages"][-1].text.endswith(f'["{scenario["name"]}"]'))

            evaluation = await agent.aevaluate([{"name": "one"}, {"name": "two"}], rollouts=2)
    assert evaluation.reward == 1.0


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_tools_that_nobody_closes_end_with_the_process() -> None:
    code = (
        "import asyncio, sys; from offbook_mcp import mcp_tools\n"
        f"tools = asyncio.run(mcp_tools({python_module('mcp_server_time')!r}))\n"
        "print(tools[0].invoke({'timezone': 'UTC'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["timezone"] == "UTC"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_without_langchain_the_command_that_installs_it_is_told_when_the_tools_are_wanted() -> None:
    code = (
        "import asyncio, sys; sys.modules['langchain_core'] = None\n"
        "import offbook_mcp; print('torch' in sys.modules)\n"
        "asyncio.run(offbook_mcp.mcp_tools('nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "False\n"
    assert install_command("langgraph") in done.stderr
