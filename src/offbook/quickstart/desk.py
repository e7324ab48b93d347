"""The order desk: a SQLite database of orders, five tools that read it, requests that name no tool, and a reward."""

import random
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import BaseTool, StructuredTool

ORDERS = 240
STATES = ("shipped", "packed", "waiting", "lost", "paid", "returned")
CARRIERS = ("Bluepost", "Hermod", "Swift", "Parvel", "Nordvan", "Quickmail")
TOOLS = ("order_status", "order_total", "order_carrier", "order_customer", "customer_phone")
"""Names of the tools, as table_column. A tool takes the table's key and returns the column."""

REQUESTS = {
    "order_status": ("has {order} left yet?", "is {order} on its way?"),
    "order_total": ("how much was {order}?", "what did we pay for {order}?"),
    "order_carrier": ("who brings {order}?", "which van has {order}?"),
    "customer_phone": ("what do I dial about {order}?", "i must ring the buyer of {order}"),
}
"""Tool that answers -> wordings of the request. `customer_phone` takes two calls: the order's customer, then the
customer's phone."""
FRAMES = (
    "{}",
    "please, {}",
    "hello, {}",
    "{} thanks",
    "can you say, {}",
    "{} I need to know",
    "quick question, {}",
    "tell us, {}",
    "{} it is urgent",
    "hi there, {} please",
    "we ask again, {}",
    "{} we wonder",
)
HELD_OUT_FRAMES = ("good day, {}", "{} please tell me", "we want to know, {}")


@dataclass(frozen=True)
class Request:
    """A scenario: a question about an order, the tool that answers it, and the answer in the database."""

    id: str
    question: str
    order: str
    tool: str
    answer: str


class Desk:
    """The order desk over a database file. The file is written if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            write_database(path)

    def look_up(self, tool: str, key: str) -> str | None:
        """The column that `tool` reads for the order or customer `key`. None if there is no such row."""
        table, column = tool.split("_")
        row = self._rows(f'SELECT "{column}" FROM "{table}" WHERE "{table}" = ?', key)
        return str(row[0][0]) if row else None

    def answer(self, tool: str, order: str) -> str:
        """The right answer for an order. A tool that takes a customer gets the order's customer."""
        key = self.look_up("order_customer", order) if tool.startswith("customer_") else order
        return str(self.look_up(tool, str(key)))

    def tools(self) -> list[BaseTool]:
        """The five tools that the agent can call."""
        return [self._tool(name) for name in TOOLS]

    def requests(self, split: str, count: int, seed: int = 0) -> list[Request]:
        """Draw `count` requests. `train` and `test` share no order.

        The `test` requests are the same for all seeds, in sentence frames that training never has."""
        orders = [str(row[0]) for row in self._rows('SELECT "order" FROM "order" ORDER BY rowid')]
        held_out = split == "test"
        orders = orders[: ORDERS // 2] if held_out else orders[ORDERS // 2 :]
        rng = random.Random(f"{split} {0 if held_out else seed}")
        requests: list[Request] = []
        for index in range(count):
            tool, order = tuple(REQUESTS)[index % len(REQUESTS)], rng.choice(orders)
            text = rng.choice(REQUESTS[tool]).format(order=f"order {order}")
            question = rng.choice(HELD_OUT_FRAMES if held_out else FRAMES).format(text)
            requests.append(Request(f"{split}-{index}", question, order, tool, self.answer(tool, order)))
        rng.shuffle(requests)
        return requests

    def _tool(self, name: str) -> BaseTool:
        table, column = name.split("_")

        def by_order(order: str) -> dict[str, str | None]:
            return {column: self.look_up(name, order)}

        def by_customer(customer: str) -> dict[str, str | None]:
            return {column: self.look_up(name, customer)}

        read: Callable[[str], dict[str, str | None]] = by_order if table == "order" else by_customer
        return StructuredTool.from_function(read, name=name, description=f"The {column} of this {table}.")

    def _rows(self, query: str, *values: str) -> list[tuple[object, ...]]:
        connection = sqlite3.connect(self.path)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()


def reward(request: Request, messages: list[BaseMessage]) -> dict[str, float]:
    """The reward of a conversation: 1 if the last message states the right answer, else 0.2 if the first call was
    right, else 0. `success` is 1 or 0."""
    right = re.search(rf"(?<!\w){re.escape(request.answer)}(?!\w)", messages[-1].text) is not None
    calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    first = "order_customer" if request.tool.startswith("customer_") else request.tool
    begun = bool(calls) and calls[0]["name"] == first and calls[0]["args"] == {"order": request.order}
    return {"reward": 1.0 if right else 0.2 * begun, "success": float(right)}


def write_database(path: Path) -> None:
    """Write the tables of 40 customers and 240 orders. The rows are always the same."""
    rng = random.Random(0)
    customers = [f"C-{number}" for number in rng.sample(range(10, 100), 40)]
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE customer (customer TEXT PRIMARY KEY, phone TEXT)")
        connection.execute(
            'CREATE TABLE "order" ("order" TEXT PRIMARY KEY, status TEXT, total TEXT, carrier TEXT, customer TEXT)'
        )
        for customer in customers:
            row = (customer, f"555-{rng.randint(1000, 9999)}")
            connection.execute("INSERT INTO customer VALUES (?, ?)", row)
        for number in rng.sample(range(1000, 10000), ORDERS):
            total = f"{rng.randint(5, 99)}.{rng.randint(0, 99):02}"
            bought = (str(number), rng.choice(STATES), total, rng.choice(CARRIERS), rng.choice(customers))
            connection.execute('INSERT INTO "order" VALUES (?, ?, ?, ?, ?)', bought)
    connection.close()
