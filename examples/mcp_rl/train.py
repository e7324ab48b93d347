"""Train the bundled policy on a server of one's own, in this process: `python -m mcp_rl.train`, in `examples`."""

import argparse
from pathlib import Path

from mcp_rl.customers import scenarios
from mcp_rl.orders import server
from measured_training import measure, model_of, parser

from offbook_mcp import MCPTrainer
from offbook_mcp.training.defaults import TINY_RATES, default_config

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    trainer = MCPTrainer(
        server,
        model_of("orders", options),
        scenarios(options.seed, options.held_out),
        scenarios_per_step=12,
        config=default_config(options.base_model, options.steps, options.rate),
        seed=options.seed,
    )
    measure(
        lambda: trainer.evaluate(temperature=1.0, rollouts=2),
        trainer.train,
        options,
        HERE / f"results/seed-{options.seed}.json",
        rollouts_per_step=12 * trainer.options.group_size,
    )
    if trainer.comparison is not None:
        print("\n".join(trainer.comparison.lines()))


if __name__ == "__main__":
    main(parser(__doc__, steps=24, rate=TINY_RATES["tiny"]).parse_args())
