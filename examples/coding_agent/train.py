"""Trains a coding agent that knows nothing of it: `python train.py --tiny`, or with a larger base on a GPU."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from tasks import write

import offbook

HERE = Path(__file__).parent
AGENTS = {
    "own": [sys.executable, "-S", str(HERE / "agent.py"), "{prompt}"],
    "claude": ["claude", "-p", "{prompt}", "--tools", "Bash", "--dangerously-skip-permissions"],
}


def main(options: argparse.Namespace) -> None:
    """Evaluates on repositories that training never shows, trains, evaluates."""
    folder = options.dir.absolute()
    write(folder, options.tiny)
    train, held_out = (read(folder / f"{name}.jsonl") for name in ("train", "held_out"))
    command = offbook.Command(
        AGENTS[options.agent],
        folder=str(folder / "repos" / "{repo}"),
        grader=shlex.join([sys.executable, str(HERE / "grade.py")]) + " {module}",
        env={"MAX_TOKENS": "64", "PATH": f".:{os.environ['PATH']}"} if options.tiny else None,
    )
    model = offbook.TrainableModel(
        f"coder-{options.seed}",
        base_model="tiny" if options.tiny else options.base_model,
        backend=offbook.LocalBackend(folder / "model"),
    )
    config = offbook.TrainConfig(learning_rate=2e-3 if options.tiny else 2e-5)
    trainer = offbook.Trainer(
        model, command, train, scenarios_per_step=6, config=config, seed=options.seed, timeout=options.timeout
    )
    print("before:", trainer.evaluate(scenarios=held_out))
    report = trainer.train(options.steps)
    print("after:", trainer.evaluate(scenarios=held_out))
    print(f"LoRA: {report.checkpoint}")


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the bundled policy, on any machine")
    parser.add_argument("--agent", choices=sorted(AGENTS), default="own", help="the program that is trained")
    parser.add_argument("--base-model", default="Qwen/Qwen2.5-Coder-7B-Instruct", help="without --tiny")
    parser.add_argument("--steps", type=int, default=6, help="steps in all")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one rollout")
    parser.add_argument("--seed", type=int, default=0, help="names the model and orders the scenarios")
    parser.add_argument("--dir", type=Path, default=Path("coding-agent"), help="folder for everything it makes")
    main(parser.parse_args())
