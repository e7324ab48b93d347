"""Trains a bundled policy: `python -m policies.make --help`."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from offbook.tiny import path

from .evaluate import load, progress_report, service_progress
from .tokenizer import make_tokenizer, template
from .train import SERVICES, STAGES, Stage, grow, make_model, save, train

NUMBERS_OF_STAGES = range(1, len(STAGES) + 1)


def command_line() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="folder that the policy is written to; default: that of `tiny`; needed with --go-on"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the episodes")
    parser.add_argument("--threads", type=int, default=2, help="torch threads before training starts; training uses 2")
    parser.add_argument("--kept", type=Path, default=Path("build/tiny"), help="folder for the weights of each stage")
    parser.add_argument(
        "--from-stage",
        type=int,
        default=1,
        choices=NUMBERS_OF_STAGES,
        help="first stage to train; the weights of the stage before are read from --kept",
    )
    parser.add_argument(
        "--to-stage", type=int, default=len(STAGES), choices=NUMBERS_OF_STAGES, help="last stage to train"
    )
    parser.add_argument(
        "--go-on", type=Path, help="folder of a policy to train further on service episodes; no stages are run"
    )
    parser.add_argument(
        "--minutes", type=float, help="with --go-on: train for this many minutes; the learning rates fall to 0 by then"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"with --go-on: train on at most this many tokens; default: {SERVICES.tokens:,}, or no limit with --minutes",
    )
    parser.add_argument(
        "--entered",
        type=float,
        default=0.0,
        help="with --go-on: begin at this share of the stage, 0 to 1; the minutes and tokens are those of the rest",
    )
    return parser


def main() -> None:
    """Train the tokenizer and the policy stage by stage, and keep the weights of each stage. With `--go-on`, train
    existing weights further instead."""
    parser = command_line()
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.go_on:
        if options.folder is None:
            parser.error("--go-on needs --folder, where the new weights are written")
        tokens = options.tokens or (SERVICES.tokens if options.minutes is None else sys.maxsize)
        stage = replace(SERVICES, tokens=tokens, minutes=options.minutes, entered=options.entered)
        continue_training(stage, options.go_on, options.folder, options.seed)
        return
    kept = [options.kept / f"stage-{number}" for number in (0, *NUMBERS_OF_STAGES)]
    begin = kept[options.from_stage - 1]
    if options.from_stage > 1 and not begin.is_dir():
        parser.error(
            f"--from-stage {options.from_stage} needs the folder {begin}: run the stages before it first, with the same --kept"
        )
    if options.from_stage == 1:
        tokenizer = make_tokenizer(options.seed)
        save(make_model(tokenizer, options.seed), tokenizer, kept[0])
    for number in range(options.from_stage, options.to_stage + 1):
        folder = kept[number] if number < len(STAGES) else options.folder or path()
        make_stage(STAGES[number - 1], kept[number - 1], folder, options.seed + number)


def continue_training(stage: Stage, begin: Path, folder: Path, seed: int) -> None:
    """Train the policy in `begin` on service episodes and write it to `folder`, with the current tokens and chat
    template."""
    model, tokenizer = load(begin)
    grow(model, tokenizer, seed)
    tokenizer.chat_template = template()

    def report() -> str:
        save(model, tokenizer, folder)
        return service_progress(model, tokenizer)

    train(model, tokenizer, stage, seed, report)
    save(model, tokenizer, folder)


def make_stage(stage: Stage, begin: Path, folder: Path, seed: int) -> None:
    """Train the policy in `begin` on one stage. It is written to `folder` at each progress report and at the end."""
    model, tokenizer = load(begin)

    def report() -> str:
        save(model, tokenizer, folder)
        return progress_report(model, tokenizer)

    train(model, tokenizer, stage, seed, report)
    save(model, tokenizer, folder)


if __name__ == "__main__":
    main()
