"""Train a planner and two workers, a LoRA each: `python -m supervisor_agent.train`, in the folder `examples`."""

import argparse
import os
from pathlib import Path
from typing import Any

from measured_training import model_of, parser, train_measured
from supervisor_agent.agent import ORDERS, make_agent

import offbook
from offbook_langgraph import trainable

os.environ.setdefault("OPENAI_API_KEY", "unused")  # ChatOpenAI wants one, though the policies answer in its place
HERE = Path(__file__).parent
HELD_OUT = 15  # orders, the last ones
REQUESTS = {
    "place": ("warehouse", "where do I find order {}?"),
    "size": ("warehouse", "does order {} fit into my car?"),
    "price": ("office", "how much is order {}?"),
    "term": ("office", "how long may we wait with order {}?"),
}
"""Field of an order -> the worker who knows it, and the request. None names a worker or a tool."""


def scenarios(orders: list[str]) -> list[dict[str, str]]:
    return [
        {"question": request.format(order), "worker": worker, "answer": ORDERS[order][field]}
        for order in orders
        for field, (worker, request) in REQUESTS.items()
    ]


def reward(scenario: dict[str, str], state: dict[str, Any]) -> float:
    """1 for the right answer, 0.3 for the right worker alone."""
    plan, last = state["messages"][1], state["messages"][-1]
    if [call["name"] for call in plan.tool_calls] != [f"ask_{scenario['worker']}"]:
        return 0.0
    return 1.0 if scenario["answer"] in last.text else 0.3


def main(options: argparse.Namespace) -> None:
    agents = {"planner": {"node": "planner"}, "warehouse": {"agent": "warehouse"}, "office": {"agent": "office"}}
    models = {model_of(name, options): calls for name, calls in agents.items()}
    trainer = trainable(make_agent(), model=models, reward=reward).trainer(
        scenarios([*ORDERS][:-HELD_OUT]),
        scenarios_per_step=12,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.1, minibatches=2),
        seed=options.seed,
    )
    held_out = scenarios([*ORDERS][-HELD_OUT:])
    train_measured(trainer, options, held_out, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=20, rate=5e-3).parse_args())
