"""Each spymaster with its own operative and with those of other seeds: `python -m codenames.cross_play --seeds 0 1 2`.

The scores say whether the codes of different seeds are the same."""

import asyncio
from argparse import Namespace

from codenames.train import HERE, arguments, matches, pair, rollout
from measured_training import write_figures

import offbook


async def main(options: Namespace) -> None:
    pairs = {seed: pair(Namespace(**vars(options) | {"seed": seed})) for seed in options.seeds}
    held_out = matches(10_000_000, 50, options.form)
    table: dict[str, dict[str, float | None]] = {}
    for mine, (spymaster, _) in pairs.items():
        for theirs, (_, operative) in pairs.items():
            trainer = offbook.Trainer([spymaster, operative], rollout, held_out)
            evaluation = await trainer.aevaluate(held_out, temperature=1.0)
            table.setdefault(f"spymaster {mine}", {})[f"operative {theirs}"] = evaluation.reward
            print(f"spymaster {mine}, operative {theirs}: {evaluation.reward:.2f}")
    if options.write:
        write_figures(table, HERE / f"results/{options.form}-cross-play.json")


if __name__ == "__main__":
    options = arguments()
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asyncio.run(main(options.parse_args()))
