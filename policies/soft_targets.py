"""Soft targets: where several completions are right, the probability of each next token.

The loss takes these probabilities in place of the one token that was drawn. The expected gradient is the same, with
less variance."""

from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from .episodes import Turn
from .tokenizer import end_id, ids_of


def soft_targets(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, written: Sequence[int]
) -> Iterator[tuple[int, dict[int, float]]]:
    """Yield (place, {token id: share}) for each place of `written` where the right completions differ in their next
    token.

    `written` are the token ids of one of the turn's completions, the end mark included. Yields nothing for other ids,
    and nothing when only one completion has a share above 0. A share is conditional on the tokens before its place, so
    the shares of a place sum to 1."""
    encoded = partial(ids_of, tokenizer)
    open_paths = {(*encoded(text), end_id(tokenizer)): share for text, share in turn.shares().items() if share > 0}
    if len(open_paths) < 2 or tuple(written) not in open_paths:
        return
    for place, token in enumerate(written):
        total = sum(open_paths.values())
        shares: dict[int, float] = {}
        for path, share in open_paths.items():
            shares[path[place]] = shares.get(path[place], 0.0) + share / total
        if len(shares) > 1:
            yield place, shares
        open_paths = {path: share for path, share in open_paths.items() if path[place] == token}
