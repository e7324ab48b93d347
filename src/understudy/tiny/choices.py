"""Where the assistant chooses: the tokens that may come next and how often each does, as its turns say.

Training takes these shares in place of the one token that was drawn: the same gradient on average, without its noise."""

from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from .episodes import Turn
from .tokenizer import end_id, ids_of


def choices(
    tokenizer: PreTrainedTokenizerBase, turn: Turn, written: Sequence[int]
) -> Iterator[tuple[int, dict[int, float]]]:
    """(place, {token: share}) for each place of `written`, the ids of one of the turn's completions and its end mark,
    where the right completions part. Nothing for ids that are none of them."""
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
