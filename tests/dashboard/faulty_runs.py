"""Two real runs with a planted fault each: a tool that fails for one order, and a reward that is the same for all."""

from __future__ import annotations

import asyncio
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import offbook
from offbook.quickstart.desk import Desk, Request, reward
from offbook_langgraph import trainable

BROKEN_TOOL, FLAT_REWARD = "broken-tool", "flat-reward"
FLAT_STEPS = 3


class ToolError(Exception):
    """What the broken tool raises."""


class BrokenDesk(Desk):
    """A desk whose first, third, ... look-up of one order fails."""

    def __init__(self, path: Path, order: str) -> None:
        super().__init__(path)
        self.order = order
        self.asked = 0

    def look_up(self, tool: str, key: str) -> str | None:
        """As the desk's, but for the broken order."""
        if key == self.order:
            self.asked += 1
            if self.asked % 2:
                raise ToolError(f"the record of order {key} is locked")
        return super().look_up(tool, key)


def record_faults(folder: Path) -> str:
    """Record both runs in `folder`/server; the id of the scenario whose tool fails."""
    return asyncio.run(_record(folder))


async def _record(folder: Path) -> str:
    desk = Desk(folder / "desk.db")
    by_order = {request.order: request for request in desk.requests("train", 24)}
    requests = list(by_order.values())[:4]
    broken = BrokenDesk(folder / "desk.db", requests[1].order)
    backend = offbook.LocalBackend(dir=folder / "server", engine="embedded", threads=1)
    try:
        await _train(backend, broken, requests, BROKEN_TOOL)
        await _train(backend, desk, requests, FLAT_REWARD)
    finally:
        backend.close()
    return requests[1].id


async def _train(backend: offbook.LocalBackend, desk: Desk, requests: list[Request], run: str) -> None:
    model = offbook.TrainableModel(name=run, project="pages", base_model="tiny")
    await model.register(backend)
    chat = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), max_completion_tokens=48)

    def score(request: Request, state: dict[str, list[BaseMessage]]) -> float:
        return 0.0 if run == FLAT_REWARD else reward(request, state["messages"])["reward"]

    agent = trainable(create_agent(chat, desk.tools()), model=model, reward=score)
    await agent.atrain(
        requests,
        steps=FLAT_STEPS if run == FLAT_REWARD else 1,
        group_size=4,
        scenarios_per_step=4,
        patience=FLAT_STEPS,
        retries=0,
        run=run,
    )
