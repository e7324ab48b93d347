"""Agents of libraries that pin too much for our environment, each a program led by its environment, as `Command` runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook import Command, RemoteBackend, TrainableModel
from offbook.base.types import Call
from offbook.testing import Action, ScriptedServer, scripted_server
from offbook.testing.asgi import Body
from offbook.testing.policy_sampler import content_text
from tests.client.results import Mode, Result, check, mode_of
from tests.fakes.obedient_policy import as_sampled, obey, turns_of
from tests.paths import ROOT

from .rollouts import one_branch

FOLDER = ROOT / "tests" / "client" / "python"
ANSWER = "the tools said 3, 7, 11"
ORDER = "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)"
ORDERS = {
    "claude-agent-sdk": ORDER.replace("add(", "mcp__sums__add("),
    "dspy": f"{ORDER} then submit(answer='{ANSWER}')",
    "smolagents": f"{ORDER} then final_answer(answer='{ANSWER}')",
}
CLIENTS = {
    "autogen": ("autogen-ext", "chat completions"),
    "autogen anthropic": ("autogen-ext", "Messages"),
    "claude-agent-sdk": ("claude-agent-sdk", "Messages"),
    "crewai": ("crewai", "chat completions"),
    "crewai anthropic": ("crewai", "Messages"),
    "dspy": ("dspy", "chat completions"),
    "dspy responses": ("dspy", "Responses"),
    "llama-index": ("llama-index-core", "chat completions"),
    "llama-index responses": ("llama-index-core", "Responses"),
    "pydantic-ai": ("pydantic-ai-slim", "chat completions"),
    "pydantic-ai anthropic": ("pydantic-ai-slim", "Messages"),
    "pydantic-ai google": ("pydantic-ai-slim", "Gemini"),
    "pydantic-ai responses": ("pydantic-ai-slim", "Responses"),
    "smolagents code": ("smolagents", "chat completions"),
    "smolagents tools": ("smolagents", "chat completions"),
}
"""Agent of `agents.py` -> the package whose version counts, and the API that it speaks."""


_ORDER = re.compile(r"(?:New task:|\[\[ ## question ## \]\])\n(.*)")


def policy(body: Body) -> Action:
    """`obey`, but for smolagents and DSPy, whose results of tools come before or in messages of the user: turn by turn of the
    first message's order, as code where no tools are offered."""
    told = [content_text(message) for message in body["messages"] if message["role"] == "user"]
    found = next(filter(None, map(_ORDER.match, told)), None)
    if found is None:
        return obey(body)
    calls = turns_of(found[1])[sum(message["role"] == "assistant" for message in body["messages"])]
    if body.get("tools"):
        return Action(calls=tuple((name, as_sampled(arguments)) for name, arguments in calls))
    lines = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    if lines[0].startswith("add"):
        lines = [f"print({line})" for line in lines]
    return Action(text="\n".join(["Thought: next.", "<code>", *lines, "</code>"]))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(policy) as running:
        yield running


def environment(client: str) -> str:
    return "crewai" if client.startswith("crewai") else "agents"


def pinned(client: str) -> str:
    """The version of the client's package in its environment."""
    text = (FOLDER / f"{environment(client)}.txt").read_text("utf-8")
    found = re.search(rf"^{CLIENTS[client][0]}==(\S+)", text, re.MULTILINE)
    assert found is not None
    return found[1]


def halves(calls: tuple[Call, ...]) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """The calls of the run with whole answers, and of the streamed one."""
    return calls[: len(calls) // 2], calls[len(calls) // 2 :]


@pytest.mark.slow("clients of Python in environments of their own")
@pytest.mark.parametrize("client", CLIENTS)
async def test_an_agent_calls_tools_as_a_program(
    server: ScriptedServer, client: str, tmp_path: Path, require: Callable[[bool, str], None]
) -> None:
    python = FOLDER / ".venv" / environment(client) / "bin" / "python"
    require(python.exists(), "make python-clients")
    server.sampler.received.clear()
    order = ORDERS.get(client.partition(" ")[0], ORDER)
    command = Command(
        [str(python), str(FOLDER / "agents.py"), client, order],
        reward="exit",
        timeout=900,
        folder=str(tmp_path),
        env={"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"},
    )
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
    trajectory = await command(model, {"order": order})
    assert (trajectory.reward, trajectory.exception) == (1.0, None), trajectory.logs
    assert trajectory.logs[0].splitlines()[-2:] == [ANSWER, ANSWER], trajectory.logs
    received = [
        asked for asked in server.sampler.received if asked.get("max_tokens") != 1
    ]  # CrewAI counts tokens: unrecorded
    calls = server.calls(trajectory.id)
    assert len(calls) == len(received) and len(calls) % 2 == 0
    runs = halves(calls)
    half = len(received) // 2
    modes: dict[Mode, None] = {mode_of(received[:half]): None, mode_of(received[half:]): None}
    extends = all(map(one_branch, runs))
    check(Result("Python", client, pinned(client), CLIENTS[client][1], half, len(runs[1]), extends, tuple(modes)))
