"""Train the player against itself: `python -m tic_tac_toe.self_play`, in the folder `examples`.

Both sides are the newest step of one model. Each match makes two trajectories, one of each side with its own reward.
A match begins with up to three random moves. From the empty board alone, two copies of a player soon play one match
again and again, and no reward differs. All first players of one opening are a group, all second players another."""

import argparse
import asyncio
import itertools
import json
import random
from pathlib import Path

from measured_training import falling, model_of, parser, rollout_of, write_figures
from openai import AsyncOpenAI
from textarena_env import Match
from tic_tac_toe.agent import board_of, choose, free, place
from tic_tac_toe.train import OPPONENTS, play

import offbook

HERE = Path(__file__).parent
OPENINGS, MATCHES, EVERY, HELD_OUT = 6, 8, 20, 300


async def match_of_itself(client: AsyncOpenAI, model: str, opening: int) -> list[offbook.Trajectory]:
    match, sides = Match("TicTacToe-v0", opening, players=2), [offbook.Trajectory(), offbook.Trajectory()]
    numbers = random.Random(opening)
    for _ in range(numbers.randint(0, 3)):
        match.play(f"[{numbers.choice(free(board_of(match)))}]")
    while not match.over:
        prompt, choice = await choose(client, model, match)
        move = offbook.History(messages_and_choices=[{"role": "user", "content": prompt}, choice])
        sides[match.player].additional_histories.append(move)
        place(match, choice)
    for side, trajectory in enumerate(sides):
        trajectory.reward = (match.rewards[side] + 1) / 2
    return sides


async def both_sides(client: AsyncOpenAI, model: str, opening: int) -> list[offbook.TrajectoryGroup]:
    matches = await asyncio.gather(*(match_of_itself(client, model, opening) for _ in range(MATCHES)))
    return [offbook.TrajectoryGroup(side) for side in zip(*matches, strict=True)]


async def rates(model: offbook.TrainableModel, held_out: int) -> dict[str, dict[str, float]]:
    """Wins and draws against each opponent, sampled."""
    found: dict[str, dict[str, float]] = {}
    for name in OPPONENTS:
        matches = [{"match": 10_000_000 + match, "opponent": name} for match in range(held_out)]
        evaluation = await offbook.Trainer(model, rollout_of(play), matches).aevaluate(matches, temperature=1.0)
        rewards = list(evaluation.rewards().values())
        found[name] = {"win": rewards.count(1.0) / held_out, "draw": rewards.count(0.5) / held_out}
    return found


async def main(options: argparse.Namespace) -> None:
    model = model_of("self-play", options)
    results, curve, begun = HERE / f"results/self-play-seed-{options.seed}.json", [], await model.get_step()
    if options.write and begun and results.exists():
        curve = [point for point in json.loads(results.read_text())["curve"] if point["step"] < begun]

    # The rate falls to zero: at a constant one, two copies of a player chase each other's last change.
    config = falling(options, kl_coef=options.kl, minibatches=2)
    for step in range(begun, options.steps + 1):
        if step % EVERY == 0:
            curve.append({"step": step} | await rates(model, options.held_out))
            print(json.dumps(curve[-1]), flush=True)
            if options.write:
                write_figures({"seed": options.seed, "curve": curve}, results)
        if step == options.steps:
            break
        client, openings = model.openai_client(), range(OPENINGS * step, OPENINGS * (step + 1))
        groups = await asyncio.gather(*(both_sides(client, model.name, opening) for opening in openings))
        await model.train(itertools.chain(*groups), config(step + 1), pbar_desc=None)


if __name__ == "__main__":
    arguments = parser(__doc__, steps=200)
    arguments.set_defaults(held_out=HELD_OUT)
    arguments.add_argument("--kl", type=float, default=0.05, help="weight of the KL to the base")
    asyncio.run(main(arguments.parse_args()))
