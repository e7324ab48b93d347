"""Train the player against itself: `python -m tic_tac_toe.self_play`, in the folder `examples`.

Both sides are the newest step of one model. Each match makes two trajectories, one of each side with its own reward;
all first players are one group, all second players the other."""

import argparse
import asyncio
import json
from pathlib import Path

from measured_training import model_of, parser, rollout_of
from openai import AsyncOpenAI
from textarena_env import Match
from tic_tac_toe.agent import choose, place
from tic_tac_toe.train import OPPONENTS, play

import offbook

HERE = Path(__file__).parent
MATCHES, EVERY, HELD_OUT = 48, 20, 100


async def match_of_itself(client: AsyncOpenAI, model: str, seed: int) -> list[offbook.Trajectory]:
    match, sides = Match("TicTacToe-v0", seed, players=2), [offbook.Trajectory(), offbook.Trajectory()]
    while not match.over:
        prompt, choice = await choose(client, model, match)
        move = offbook.History(messages_and_choices=[{"role": "user", "content": prompt}, choice])
        sides[match.player].additional_histories.append(move)
        place(match, choice)
    for side, trajectory in enumerate(sides):
        trajectory.reward = (match.rewards[side] + 1) / 2
    return sides


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

    def config(step: int) -> offbook.TrainConfig:
        """The rate falls to zero: at a constant one, two copies of a player chase each other's last change."""
        rate = options.rate * (1 - (step - 1) / options.steps)
        return offbook.TrainConfig(learning_rate=rate, kl_coef=options.kl, minibatches=2)

    for step in range(begun, options.steps + 1):
        if step % EVERY == 0:
            curve.append({"step": step} | await rates(model, options.held_out))
            print(json.dumps(curve[-1]), flush=True)
            if options.write:
                results.write_text(json.dumps({"seed": options.seed, "curve": curve}, indent=1) + "\n")
        if step == options.steps:
            break
        client, seeds = model.openai_client(), range(MATCHES * step, MATCHES * (step + 1))
        matches = await asyncio.gather(*(match_of_itself(client, model.name, seed) for seed in seeds))
        groups = [offbook.TrajectoryGroup([match[side] for match in matches]) for side in (0, 1)]
        await model.train(groups, config(step + 1), request_id=f"{model.name}-{step}", pbar_desc=None)


if __name__ == "__main__":
    arguments = parser(__doc__, steps=200)
    arguments.set_defaults(rate=1e-3, held_out=HELD_OUT)
    arguments.add_argument("--kl", type=float, default=0.05, help="weight of the KL to the base")
    asyncio.run(main(arguments.parse_args()))
