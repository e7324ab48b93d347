"""Answers a shop's customers about their orders, on a model that its firm pays for. It imports nothing of Offbook, and names each thread in a header."""

import json
from typing import Any

from openai import AsyncOpenAI

STATES, CARRIERS = ("shipped", "packed", "waiting", "lost", "paid"), ("Bluepost", "Hermod", "Swift", "Nordvan")
ORDERS = {
    str(1000 + 37 * number): {
        "status": STATES[number % len(STATES)],
        "carrier": CARRIERS[number % len(CARRIERS)],
        "total": f"{5 + number * 7 % 90}.{10 + number * 3 % 90}",
    }
    for number in range(200)
}
DOWN: set[str] = set()
"""Columns whose system does not answer."""
PARAMETERS = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": f"order_{column}",
            "description": f"The {column} of this order.",
            "parameters": PARAMETERS,
        },
    }
    for column in ("status", "carrier", "total")
]


def look_up(tool: str, order: str) -> str:
    """What a tool returns for an order."""
    column = tool.removeprefix("order_")
    if column in DOWN:
        return f"Error: the system with each order's {column} does not answer"
    return ORDERS[order].get(column, "no such tool") if order in ORDERS else "no such order"


async def answer(client: AsyncOpenAI, question: str, thread: str) -> tuple[str, str]:
    """The answer to a customer, and the name of the model that gave it."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        completion = await client.chat.completions.create(
            model="gpt-4.1-mini",
            messages=messages,
            tools=TOOLS,
            temperature=0,
            max_completion_tokens=48,
            extra_headers={"x-offbook-thread": thread},
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        if not calls or len(messages) > 8:
            return message.content or "", completion.model
        for call in calls:
            found = look_up(call.function.name, str(_arguments(call.function.arguments).get("order")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
