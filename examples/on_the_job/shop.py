"""The shop's customers: each asks the agent on a thread of its own, and says afterwards whether the answer was right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
from on_the_job.agent import ORDERS, answer
from on_the_job.paid import QUESTIONS
from openai import AsyncOpenAI

from offbook_production.wire import TakeoverState

AT_ONCE = 32
"""Customers who ask at a time. Then they score, and the next ones ask."""


@dataclass
class Shop:
    """The shop behind the address of its agent's model. `rows`: a row for each AT_ONCE customers."""

    url: str
    seed: int
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    marks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._told = 0
        self._name = f"customer-{uuid4().hex[:6]}"
        self._client = AsyncOpenAI(base_url=f"{self.url}/r/order-desk/v1", api_key="unused")
        self._http = httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False)

    @property
    def threads(self) -> int:
        """Customers served so far."""
        return AT_ONCE * len(self.rows)

    def mark(self, what: str) -> None:
        """Note what happens from here on."""
        self.marks.append({"threads": self.threads, "what": what})
        print(f"\n{self.threads:>6,}  {what}", flush=True)

    async def aclose(self) -> None:
        await self._client.close()
        await self._http.aclose()

    async def takeover(self) -> TakeoverState:
        return TakeoverState.model_validate_json((await self._http.get("/api/takeover")).content)

    async def serve(self, most: int, until: Callable[[TakeoverState], bool] = lambda _: False) -> TakeoverState:
        """Serve customers until the takeover is as wished, and `most` of them at most. Prints each decision."""
        state = await self.takeover()
        for _ in range(0, most, AT_ONCE):
            first = self.threads
            served = await asyncio.gather(*(self._customer(first + number) for number in range(AT_ONCE)))
            await asyncio.gather(*(self._score(first + number, right) for number, (right, _) in enumerate(served)))
            small = sum(not model.startswith("gpt-") for _, model in served)
            right = sum(right for right, _ in served) / AT_ONCE
            self.rows.append({"threads": self.threads, "small": small / AT_ONCE, "right": right})
            state = await self.takeover()
            for decision in state.decisions[self._told :]:
                numbers = decision.numbers
                seen = f" ({numbers.small} at {numbers.small_score:.2f})" if numbers.small_score is not None else ""
                print(f"{self.threads:>6,}  {decision.verdict}: {decision.reason}{seen}", flush=True)
            self._told = len(state.decisions)
            if until(state):
                break
        return state

    async def _customer(self, number: int) -> tuple[float, str]:
        tool, order = self._draw.choice([*QUESTIONS]), self._draw.choice([*ORDERS])
        question = self._draw.choice(QUESTIONS[tool]).format(order)
        said, model = await answer(self._client, question, f"{self._name}-{number}")
        return float(ORDERS[order][tool.removeprefix("order_")] in said), model

    async def _score(self, number: int, right: float) -> None:
        """A thread is recorded behind its answer, so its score may come too early."""
        for _ in range(50):
            body = {"thread_id": f"{self._name}-{number}", "score": right}
            answer = await self._http.post("/api/feedback", json=body)
            if answer.status_code != 404:
                break
            await asyncio.sleep(0.1)
        answer.raise_for_status()
