"""A rollout on an MCP server as it is written for OpenPipe ART: only the import says something else."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

import offbook.compat.art as art
from offbook.compat.art.mcp import complete_task_tool  # type: ignore[import-not-found]
from offbook.compat.art.rewards import ruler_score_group  # type: ignore[import-not-found]
from offbook.testing import ShownConversation, judges, scripted_llm

SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("staff", log_level="WARNING")


@server.tool()
def desk(person: str) -> str:
    """The desk of a person."""
    return {"Ada": "12", "Bo": "4"}[person]


server.run("stdio")
'''


@dataclass
class McpScenario:
    task_description: str
    server_params: StdioServerParameters
    max_turns: int = 3


async def rollout(model: art.Model, scenario: McpScenario, number: int) -> art.Trajectory:
    traj = art.Trajectory(
        messages_and_choices=[],
        reward=0,
        metadata={"task": scenario.task_description},
        metrics={"task_completed": False, "ran_out_of_turns": False},
    )
    async with stdio_client(scenario.server_params) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools: list[Any] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in (await session.list_tools()).tools
        ]
        tools.append(complete_task_tool)
        traj.tools = tools
        traj.messages_and_choices = [
            {"role": "system", "content": f"You are MCP agent {number}. When the task is done, call complete_task."},
            {"role": "user", "content": scenario.task_description},
        ]
        client = model.openai_client()
        for _ in range(scenario.max_turns):
            async with traj.track_duration("llm_completion"):
                response = await client.chat.completions.create(
                    model=model.name, messages=traj.messages(), tools=traj.tools, max_completion_tokens=48
                )
            choice = response.choices[0]
            traj.messages_and_choices.append(choice)
            for call in choice.message.tool_calls or []:
                arguments = json.loads(call.function.arguments or "{}")
                if call.function.name == "complete_task":
                    traj.metrics["task_completed"] = True
                    content = str(arguments.get("summary"))
                else:
                    result = await session.call_tool(call.function.name, arguments)
                    content = str(getattr(result.content[0], "text", "")) if result.content else ""
                traj.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if traj.metrics["task_completed"] or not choice.message.tool_calls:
                break
        else:
            traj.metrics["ran_out_of_turns"] = True
    return traj.finish()


@pytest.mark.slow("more real servers")
async def test_the_mcp_agent_is_trained_through_ruler_after_changing_its_import(
    local_backend: art.LocalBackend, litellm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    (tmp_path / "staff.py").write_text(SERVER)
    params = StdioServerParameters(command=sys.executable, args=[str(tmp_path / "staff.py")])
    model = art.TrainableModel(name="agent-mcp", project="mcp", base_model="tiny")
    await model.register(local_backend)
    scored = iter(range(100))

    def differs(conversations: list[ShownConversation]) -> float:
        return next(scored) / 100

    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, McpScenario(task, params), number) for number in range(3))
            for task in ("desk of person Ada",)
        ),
        pbar_desc="train gather step",
    )
    with scripted_llm(lambda request: judges(request, differs)) as endpoint:
        judged = [
            await ruler_score_group(group, "openai/judge", {"api_base": endpoint.url, "api_key": "k"})
            for group in groups
        ]
        assert all("complete_task" in str(request.messages) for request in endpoint.requests)
    result = await model.train(judged, config=art.TrainConfig(learning_rate=1e-5))
    assert await model.get_step() == 1 and result.metrics["trajectories/trained"] == 3
    called = [message for trajectory in groups[0] for message in trajectory.messages() if message["role"] == "tool"]
    assert "12" in {message["content"] for message in called}, called  # what the server answered
