"""Train the desk's model: `python -m typescript_agent.train`, in the folder `examples`."""

import argparse
import json
from pathlib import Path
from typing import Any

from measured_training import model_of, parser, train_measured

import offbook

HERE = Path(__file__).parent
ROOMS: dict[str, dict[str, str]] = json.loads((HERE / "rooms.json").read_text())
HELD_OUT = 12  # rooms, the last of the file
REQUESTS = {"guest": "who sleeps in room {}?", "rate": "how much is room {}?"}
"""Field of a room -> the request that it answers. None names a tool, and one tool is never the right one."""


def scenarios(rooms: list[str]) -> list[dict[str, str]]:
    """The requests about each room, with their answers."""
    return [
        {"prompt": request.format(room), "answer": ROOMS[room][field]}
        for room in rooms
        for field, request in REQUESTS.items()
    ]


def reward(scenario: Any, trajectory: offbook.Trajectory) -> float:
    """1 if the last message states the answer, else 0."""
    return float(scenario["answer"] in str(trajectory.messages()[-1].get("content")))


def main(options: argparse.Namespace) -> None:
    """Evaluates on rooms that training never shows, trains, evaluates."""
    agent = offbook.Command(["node", str(HERE / "agent.ts"), "{prompt}"], reward="none", timeout=60)
    train, held_out = scenarios([*ROOMS][:-HELD_OUT]), scenarios([*ROOMS][-HELD_OUT:])
    trainer = offbook.Trainer(
        model_of("night-desk", options),
        agent,
        train,
        reward=reward,
        concurrency=8,
        scenarios_per_step=6,
        config=offbook.TrainConfig(loss="cross_entropy", min_reward=1.0, learning_rate=options.rate, minibatches=8),
        seed=options.seed,
    )
    train_measured(trainer, options, held_out, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=10, rate=2e-3).parse_args())
