"""Reads training examples: JSONL and JSON files, lists of conversations and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message, Tool
from offbook.base.user_values import as_list
from offbook.client.rollouts.dataset import UnpaddedRows, unpadded
from offbook.scenarios.file_rows import FileRow, json_rows, jsonl_rows, row_of

from .chat_rows import read_row
from .masking import Masking, TextFilter

Rows: TypeAlias = Iterable[Mapping[str, Json] | list[Message]]
"""Rows of a data set, or lists of messages."""
READERS = {".jsonl": (jsonl_rows, "line"), ".json": (json_rows, "row")}
"""By the ending of a file: its reader, and the word for a place in it."""
SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Conversation:
    """One training example. `weights`: by index of a message of the assistant; a missing one is 1, and 0 is not trained.
    `source`: where it was read, such as "data.jsonl, line 12"."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    weights: Mapping[int, float]
    source: str


@dataclass(frozen=True)
class ConversationSet:
    """The examples that were read. `skipped`: rows that were left out, and `faults` those of the first of them;
    `redacted`: texts that the filter changed; `unread`: fields of rows that no conversation has."""

    conversations: tuple[Conversation, ...]
    skipped: int = 0
    faults: tuple[str, ...] = ()
    redacted: int = 0
    unread: tuple[str, ...] = ()


def read_conversations(
    what: str | Path | Rows, *, skip_bad: bool = False, filter: TextFilter | None = None
) -> ConversationSet:
    """Read a `.jsonl` or `.json` file, a list of dicts, or a `datasets.Dataset`, one conversation a row.

    `filter` replaces each text that may be trained; by default secrets that Offbook knows are masked, unless the environment
    variable OFFBOOK_REDACT is 0. Raises ConfigError that names each faulty row and field. With `skip_bad` such rows are left
    out and counted; it is still raised for a file that cannot be read and for a set without any conversation."""
    masking = Masking(filter)
    conversations: list[Conversation] = []
    faults: list[str] = []
    skipped = 0
    unread: dict[str, None] = {}
    for row, source in _rows(what):
        try:
            if row.values is None:
                raise ConfigError(row.fault)
            read = read_row(row.values)
        except ConfigError as error:
            skipped += 1
            faults += [f"{source}: {error}"] if len(faults) < SHOWN_FAULTS else []
            continue
        unread |= dict.fromkeys(sorted(read.unread))
        messages = tuple(masking.message(message) for message in read.messages)
        conversations.append(Conversation(messages, masking.tools(read.tools), read.weights, source))
    if skipped > len(faults):
        faults.append(f"and {skipped - len(faults)} more")
    name = str(what) if isinstance(what, str | Path) else "train_sft"
    if skipped and not skip_bad:
        raise ConfigError("\n".join([*faults, "skip_bad=True (--skip-bad) leaves such rows out and counts them"]))
    if not conversations:
        raise ConfigError("\n".join([*faults, f"{name}: it holds no conversation that can be trained"]))
    return ConversationSet(tuple(conversations), skipped, tuple(faults), masking.count, tuple(unread))


def _rows(what: str | Path | Rows) -> Iterator[tuple[FileRow, str]]:
    """The rows with their sources."""
    if isinstance(what, str | Path):
        file = Path(what)
        reader, word = READERS.get(file.suffix.lower(), (None, ""))
        if reader is None:
            raise ConfigError(
                f"{file}: a file that ends in {' or '.join(READERS)} is needed, or rows: datasets.load_dataset(...)"
            )
        try:
            for row in reader(file):
                yield row, f"{file.name}, {word} {row.place}"
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
        return
    rows = unpadded(what)
    items = rows if isinstance(rows, UnpaddedRows) else as_list(rows, "train_sft", "conversation")
    for place, item in enumerate(items):
        wrapped: object = {"messages": item} if isinstance(item, list) else item
        yield row_of(place, wrapped, "key"), f"row {place}"
