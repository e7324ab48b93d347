"""A real run for the tests of pages: the quickstart's agent, trained for a few steps on few requests with the tiny policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import offbook
from offbook.base.config import TrainConfig
from offbook.quickstart.desk import Desk
from offbook.quickstart.run import trainable_agent

RUN = "order-desk"
MODEL = "clerk"


def record_run(folder: Path, steps: int = 3, *, keep_tokens: int = 10) -> None:
    """Train `steps` steps in `folder`/server, with an evaluation before and after; the server has ended afterwards."""
    asyncio.run(_record(folder, steps, keep_tokens))


async def _record(folder: Path, steps: int, keep_tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    desk = Desk(folder / "desk.db")
    model = offbook.TrainableModel(name=MODEL, project="pages", base_model="tiny")
    backend = offbook.LocalBackend(dir=folder / "server", engine="embedded", threads=1, keep_tokens=keep_tokens)
    try:
        await model.register(backend)
        agent = trainable_agent(desk, model)
        await agent.atrain(
            desk.requests("train", 24),
            steps=steps,
            group_size=4,
            scenarios_per_step=4,
            eval=desk.requests("test", 8),
            config=TrainConfig(learning_rate=2e-3, kl_coef=0.05),
            run=RUN,
        )
    finally:
        backend.close()
