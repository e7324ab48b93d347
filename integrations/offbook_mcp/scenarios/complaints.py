"""Extracts the values that an error message lists for the argument it complains about."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .harvest import Leaf
from .listed_values import ListedValues, lists_in
from .sampler import DraftCall
from .slots import Slot


def leaves_of_complaint(draft: DraftCall, text: str) -> Iterator[Leaf]:
    """The values listed in the error message of a drawn call, such as `unknown table 'x'; tables: users, orders`.

    They belong to the argument that the list's label names, else to the one whose value the message repeats, else to the
    call's only open text; else they keep the words of the label.
    """
    picks = [pick for pick in draft.picks if pick.slot.kind == "string" and not pick.slot.closed]
    drawn = {pick.value for pick in picks}
    open_slots = {pick.slot.key: pick.slot for pick in picks}
    blamed = {pick.slot.key: pick.slot for pick in picks if _repeats(text, str(pick.value))}
    for listed in lists_in(text):
        words = _words(listed, open_slots, blamed)
        for value in listed.values:
            if words and value not in drawn:
                yield Leaf(value, f"{draft.tool.name}: error {' '.join(words)}", words)


def _words(listed: ListedValues, open_slots: dict[str, Slot], blamed: dict[str, Slot]) -> tuple[str, ...]:
    named = {key: slot for key, slot in open_slots.items() if listed.label and slot.words[-1:] == listed.label[-1:]}
    for slots in (named, blamed, open_slots):
        if len(slots) == 1:
            return next(iter(slots.values())).words
    return listed.label


def _repeats(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
