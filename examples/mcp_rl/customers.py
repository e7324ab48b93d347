"""What customers ask. No request names a tool: which one fits is what the model has to learn."""

from __future__ import annotations

import random

from mcp_rl.orders import ORDERS

from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall

ASKED = {
    "order_status": (
        "how far along is order {}?",
        "is anything late with order {}?",
        "what is going on with order {}?",
    ),
    "order_item": ("what is in order {}?", "what did I buy with order {}?", "I forgot what I wanted with order {}"),
    "order_city": ("where does order {} go?", "where to is order {}?", "I may have moved, which town has order {}?"),
}
FIELDS = {"order_status": "status", "order_item": "item", "order_city": "city"}
HELD_OUT = 12


def scenarios(seed: int = 0, held_out: int | None = None) -> list[McpScenario]:
    """Every tool with every order, in random wordings. Of the last orders, which are held out, the first `held_out` scenarios."""
    rng = random.Random(seed)
    made: list[McpScenario] = []
    for number, (order, fields) in enumerate(ORDERS.items()):
        for tool, wordings in ASKED.items():
            made.append(
                McpScenario(
                    id=f"{tool}-{order}",
                    task=rng.choice(wordings).format(order),
                    difficulty=1,
                    tools=(tool,),
                    check=CheckKind.ANSWER,
                    calls=(ReferenceCall(tool=tool, arguments={"order": order}),),
                    answer=(fields[FIELDS[tool]],),
                    split="eval" if number >= len(ORDERS) - HELD_OUT else "train",
                    source="user",
                )
            )
    train, measured = ([one for one in made if one.split == split] for split in ("train", "eval"))
    return [*train, *measured[:held_out]]
