"""Clients that run on Node: OpenAI's, Anthropic's and Google's SDKs, Vercel's AI SDK and LangGraph.js, led by the environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from offbook.base.types import new_id
from offbook.processes.environment import ProgramGateway, gateway_variables, program_environment
from offbook.testing import ScriptedServer
from tests.client.results import Result, check, mode_of
from tests.fakes.node import NODE_CLIENTS, node_program

from .rollouts import one_branch, recorded

ORDER = "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)"
CLIENTS = {
    "openai": "chat completions",
    "openai responses": "Responses",
    "@anthropic-ai/sdk": "Messages",
    "@google/genai": "Gemini",
    "@ai-sdk/openai": "Responses",
    "@ai-sdk/openai chat": "chat completions",
    "@ai-sdk/anthropic": "Messages",
    "@langchain/openai": "chat completions",
    "@langchain/openai responses": "Responses",
    "@langchain/anthropic": "Messages",
}
"""Agent of `agents.mjs` -> the API that it speaks."""


@pytest.fixture(scope="module")
def node(require: Callable[[bool, str], None]) -> Path:
    return node_program(require)


@pytest.mark.slow("clients on Node")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_calls_tools(served: ScriptedServer, node: Path, client: str, streamed: bool, tmp_path: Path) -> None:
    rollout = new_id("traj")
    added = gateway_variables(ProgramGateway(served.url, rollout, "default"), tmp_path, os.environ)
    done = subprocess.run(
        [node, NODE_CLIENTS / "agents.mjs", client, "streamed" if streamed else "whole", ORDER],
        env=program_environment(added, os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the tools said 3, 7, 11"]), done.stderr
    calls, received = recorded(served, rollout, 3), served.sampler.received
    assert one_branch(calls)
    package = client.partition(" ")[0]
    pinned = json.loads((NODE_CLIENTS / "package.json").read_text("utf-8"))["dependencies"][package]
    check(Result("Node", package, pinned, CLIENTS[client], len(received), len(calls), True, (mode_of(received),)))
    assert bool(received[0].get("stream")) is streamed


def test_the_lock_names_the_registry_alone_and_every_pinned_version() -> None:
    """A mirror's address would reach whoever installs, and a version that is not the pinned one would be another client."""
    lock = json.loads((NODE_CLIENTS / "package-lock.json").read_text("utf-8"))
    wanted = json.loads((NODE_CLIENTS / "package.json").read_text("utf-8"))
    own = lock["packages"].pop("")
    assert own["dependencies"] == wanted["dependencies"]
    assert own["optionalDependencies"] == wanted["optionalDependencies"]
    for place, package in lock["packages"].items():
        registry = "https://registry.npmjs.org/"
        assert package.get("resolved", registry).startswith(registry), place
        assert package["integrity"].startswith("sha512-"), place
    for name, version in (wanted["dependencies"] | wanted["optionalDependencies"]).items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
