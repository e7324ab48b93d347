"""Makes the bundled policy from nothing: `python -m understudy.tiny.make --help`."""

import argparse
from pathlib import Path

import torch

from . import path
from .evaluate import glance, load
from .tokenizer import make_tokenizer
from .train import STAGES, Stage, make_model, save, train


def main() -> None:
    """Trains the tokenizer and the policy stage by stage, and writes both; each stage's weights are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path(), help="where the policy is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kept", type=Path, default=Path("build/tiny"), help="where each stage's weights are kept")
    numbers = range(1, len(STAGES) + 1)
    parser.add_argument(
        "--from-stage", type=int, default=1, choices=numbers, help="go on after the stages before, as they were kept"
    )
    parser.add_argument("--to-stage", type=int, default=len(STAGES), choices=numbers)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = [options.kept / f"stage-{number}" for number in (0, *numbers)]
    begin = kept[options.from_stage - 1]
    if options.from_stage > 1 and not begin.is_dir():
        parser.error(
            f"--from-stage {options.from_stage} needs {begin}, which an earlier run with the same --kept writes"
        )
    if options.from_stage == 1:
        tokenizer = make_tokenizer(options.seed)
        save(make_model(tokenizer, options.seed), tokenizer, kept[0])
    for number in range(options.from_stage, options.to_stage + 1):
        folder = kept[number] if number < len(STAGES) else options.folder
        make_stage(STAGES[number - 1], kept[number - 1], folder, options.seed + number)


def make_stage(stage: Stage, begin: Path, folder: Path, seed: int) -> None:
    """Trains the policy in `begin` further, and writes it to `folder` at each probe and at the end."""
    model, tokenizer = load(begin)

    def probe() -> str:
        save(model, tokenizer, folder)
        return glance(model, tokenizer)

    train(model, tokenizer, stage, seed, probe)
    save(model, tokenizer, folder)


if __name__ == "__main__":
    main()
