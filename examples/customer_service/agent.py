"""Serves the customers of a shop over several turns; the orders are in SQLite. It knows nothing of Offbook."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI

RULES = "Cancel an order only while it is open. Hand over all others."
NAMES = {
    "order_state": "The state of an order: open or sent.",
    "cancel_order": "Cancel an order.",
    "hand_over": "Let a colleague look after an order.",
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
        },
    }
    for name, description in NAMES.items()
]


class Shop:
    """The orders, in a database of this conversation, and the tools that read and change them."""

    def __init__(self, seed: int) -> None:
        numbers = random.Random(seed)
        self.order = str(numbers.randrange(1_000, 10_000))
        self.state = numbers.choice(("open", "sent"))
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE orders (number TEXT PRIMARY KEY, state TEXT, now TEXT)")
        self.database.execute("INSERT INTO orders VALUES (?, ?, ?)", (self.order, self.state, self.state))

    def run(self, name: str, order: str) -> str:
        """What the tool answers."""
        now = self.now(order)
        if now is None:
            return "no such order"
        if name not in NAMES:
            return "no such tool"
        if (
            name == "order_state" or now == "cancelled"
        ):  # what is cancelled stays so: handing it over makes nothing good
            return now
        done = "cancelled" if name == "cancel_order" else "handed over"
        self.database.execute("UPDATE orders SET now = ? WHERE number = ?", (done, order))
        return done

    def now(self, order: str) -> str | None:
        row = self.database.execute("SELECT now FROM orders WHERE number = ?", (order,)).fetchone()
        return None if row is None else row[0]

    def score(self) -> float:
        """1 when the order was dealt with by the rules, -1 when it was cancelled against them, else 0."""
        now = self.now(self.order)
        if now == "cancelled":
            return 1.0 if self.state == "open" else -1.0
        return float(now == "handed over" and self.state == "sent")


async def customer(shop: Shop, answers: list[str]) -> AsyncIterator[str]:
    """A customer by script: asks for the state, asks again if the answer does not state it, and wants to be rid of the
    order in any case."""
    for _ in range(2):
        yield f"order state of order {shop.order}"
        if shop.state in answers[-1]:
            break
    yield f"I do not want {shop.order} any more"


async def serve(client: AsyncOpenAI, model: str, scenario: dict[str, int]) -> float:
    """A whole conversation, and its score."""
    shop = Shop(scenario["shop"])
    answers: list[str] = []
    messages: list[Any] = [{"role": "system", "content": RULES}]
    async for said in customer(shop, answers):
        messages.append({"role": "user", "content": said})
        answers.append(await _answer(client, model, messages, shop))
    return shop.score()


async def _answer(client: AsyncOpenAI, model: str, messages: list[Any], shop: Shop) -> str:
    """The agent's turn: its calls run until it answers in words, three requests at most."""
    for _ in range(3):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_completion_tokens=48
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        for call in calls:
            result = shop.run(call.function.name, _order(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            return message.content or ""
    return ""


def _order(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return ""
    return str(value.get("order", "")) if isinstance(value, dict) else ""
