"""Makes the bundled policy from nothing: `python -m understudy.tiny.make --help`."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from . import path
from .evaluate import glance, glance_at_services, load
from .tokenizer import make_tokenizer, template
from .train import SERVICES, STAGES, Stage, grow, make_model, save, train


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
    parser.add_argument(
        "--go-on", type=Path, help="train these weights further on service episodes; nothing from nothing"
    )
    parser.add_argument("--minutes", type=float, help="with --go-on: end after this time, rates fallen")
    parser.add_argument("--tokens", type=int, default=SERVICES.tokens, help="with --go-on: end after so many tokens")
    parser.add_argument(
        "--entered", type=float, default=0.0, help="with --go-on: share of the stage done before, 0 to 1"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.go_on:
        go_on(
            replace(SERVICES, tokens=options.tokens, minutes=options.minutes, entered=options.entered),
            options.go_on,
            options.folder,
            options.seed,
        )
        return
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


def go_on(stage: Stage, begin: Path, folder: Path, seed: int) -> None:
    """Trains the policy in `begin` on, with a token for every tool's number and the present chat template."""
    model, tokenizer = load(begin)
    grow(model, tokenizer, seed)
    tokenizer.chat_template = template()

    def probe() -> str:
        save(model, tokenizer, folder)
        return glance_at_services(model, tokenizer)

    train(model, tokenizer, stage, seed, probe)
    save(model, tokenizer, folder)


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
