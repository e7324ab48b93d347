"""Makes the bundled policy from nothing, or trains it further: `python -m understudy.tiny.make --help`."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from . import path
from .evaluate import load
from .tokenizer import make_tokenizer, template
from .train import ANNEALING, Recipe, make_model, train


def main() -> None:
    """Trains the tokenizer and the policy, and writes both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path(), help="where the policy is written")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="tokens to train on, padding included")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="end sooner than the tokens allow")
    parser.add_argument("--resume", action="store_true", help="anneal the weights of the folder")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.resume:
        model, tokenizer = load(options.folder)
        tokenizer.chat_template = template()
    else:
        tokenizer = make_tokenizer(options.seed)
        model = make_model(tokenizer, options.seed)
    stage = ANNEALING if options.resume else Recipe()
    recipe = replace(stage, seed=options.seed, tokens=options.tokens, minutes=options.minutes)
    train(model, tokenizer, recipe, options.folder)


if __name__ == "__main__":
    main()
