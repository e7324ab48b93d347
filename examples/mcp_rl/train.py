"""Train the bundled policy on a server of one's own, in this process: `python train.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from customers import scenarios
from orders import server

from offbook import LocalBackend, TrainableModel
from offbook_mcp import MCPTrainer


def main() -> None:
    """Run again with the same seed, it goes on where it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("mcp-rl"), help="folder for everything it makes")
    options = parser.parse_args()
    model = TrainableModel(f"orders-{options.seed}", base_model="tiny", backend=LocalBackend(options.dir))
    trainer = MCPTrainer(server, model, scenarios(options.seed), scenarios_per_step=12, seed=options.seed)
    report = trainer.train(options.steps)
    if trainer.comparison is not None:
        print("\n".join(trainer.comparison.lines()))
    print(f"LoRA: {report.checkpoint}")


if __name__ == "__main__":
    main()
