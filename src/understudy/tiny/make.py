"""Makes the bundled policy from nothing, or trains it further: `python -m understudy.tiny.make --help`."""

import argparse
from pathlib import Path

import torch

from . import path
from .evaluate import load
from .tokenizer import make_tokenizer
from .train import Recipe, make_model, train


def main() -> None:
    """Reads the options, trains the tokenizer and the policy, and writes both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path(), help="where the policy is written")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="tokens to train on, padding included")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="end sooner than the tokens allow")
    parser.add_argument("--resume", action="store_true", help="start from the folder's weights and tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.resume:
        model, tokenizer = load(options.folder)
        grown_at, prompt_weight = 0.0, 0.0
    else:
        tokenizer = make_tokenizer(options.seed)
        model = make_model(tokenizer, options.seed)
        grown_at, prompt_weight = Recipe.grown_at, Recipe.prompt_weight
    recipe = Recipe(
        seed=options.seed,
        tokens=options.tokens,
        minutes=options.minutes,
        grown_at=grown_at,
        prompt_weight=prompt_weight,
    )
    train(model, tokenizer, recipe, options.folder)


if __name__ == "__main__":
    main()
