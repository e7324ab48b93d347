"""The text of single tokens, by the base's tokenizer.json and without torch. Bytes that are no whole character are shown as
bytes: a token is what the model sampled, not what its neighbours make of it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from ... import tiny
from ...types import Json

log = logging.getLogger(__name__)

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenPiece:
    """One token. `special`: markup of the tokenizer, such as the end of a turn. `part_of`: the character whose bytes this
    and neighbouring tokens hold, "" where the token is text by itself."""

    text: str
    special: bool = False
    part_of: str = ""


class TokenPieces:
    """Pieces of one tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Reads tokenizer.json of a model folder. Raises OSError, ValueError where there is none that can be read."""
        text = (folder / "tokenizer.json").read_text("utf-8")
        described = cast(dict[str, Json], json.loads(text))
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        self._byte_level = "ByteLevel" in json.dumps([described.get("decoder"), described.get("pre_tokenizer")])
        added = cast(list[dict[str, Json]], described.get("added_tokens") or [])
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._known: dict[int, bytes | None] = {}

    def pieces(self, ids: Sequence[int]) -> list[TokenPiece]:
        """A piece for each id, in order."""
        raw = [self._bytes(token) for token in ids]
        whole = _characters(
            [b"" if token in self._added or piece is None else piece for token, piece in zip(ids, raw, strict=True)]
        )
        return [
            TokenPiece(self._added[token], special=True)
            if token in self._added
            else TokenPiece(
                f"\N{MATHEMATICAL LEFT ANGLE BRACKET}id {token}\N{MATHEMATICAL RIGHT ANGLE BRACKET}", special=True
            )
            if piece is None
            else TokenPiece(shown_bytes(piece), part_of=character)
            for token, piece, character in zip(ids, raw, whole, strict=True)
        ]

    def text(self, ids: Sequence[int]) -> str:
        """The ids as one text, markup included; bytes that are no character are shown as bytes."""
        parts: list[bytes] = []
        for token in ids:
            known = self._added.get(token)
            parts.append(known.encode() if known is not None else self._bytes(token) or b"")
        return shown_bytes(b"".join(parts))

    def _bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None for an id that the tokenizer does not have."""
        if token not in self._known:
            text = self._tokenizer.id_to_token(token)
            self._known[token] = None if text is None else self._encoded(text)
        return self._known[token]

    def _encoded(self, text: str) -> bytes:
        if self._byte_level:
            alphabet = _alphabet()
            if all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return text.encode()
        if found := _BYTE.fullmatch(text):
            return bytes([int(found[1], 16)])
        return text.replace(_SPACE, " ").encode()


def shown_bytes(raw: bytes) -> str:
    """UTF-8 as text; bytes that are none as `⟨E2 82⟩`."""
    parts: list[str] = []
    while raw:
        try:
            parts.append(raw.decode())
            break
        except UnicodeDecodeError as error:
            bad = raw[error.start : error.end]
            parts.append(raw[: error.start].decode())
            parts.append(
                f"\N{MATHEMATICAL LEFT ANGLE BRACKET}{bad.hex(' ').upper()}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
            )
            raw = raw[error.end :]
    return "".join(parts)


def _characters(raw: Sequence[bytes]) -> list[str]:
    """For each piece of bytes, the character that it shares with its neighbours; "" where it holds whole ones."""
    found = [""] * len(raw)
    start, pending = 0, b""
    for i, piece in enumerate(raw):
        if not pending:
            start = i
        pending += piece
        try:
            text = pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and i - start < 4:
                continue
            pending = b""
            continue
        if i > start:
            shared = next((c for c in text if len(c.encode()) > 1), "")
            for k in range(start, i + 1):
                found[k] = shared if not _is_text(raw[k]) else ""
        pending = b""
    return found


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=4)
def _loaded(folder: Path, changed: int) -> TokenPieces | None:
    del changed  # part of the cache's key
    try:
        return TokenPieces(folder)
    except (OSError, ValueError) as error:
        log.warning("Tokens are shown as ids: %s", error)
        return None


def folder_of_base(name: str) -> Path | None:
    """Where a base model's tokenizer lies on this machine; nothing is downloaded. None where it is not here."""
    if name == "tiny":
        return tiny.path()
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return folder
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # no name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def pieces_of(folder: Path | None) -> TokenPieces | None:
    """The pieces of a base model's folder; None where it has no tokenizer.json that can be read."""
    path = folder / "tokenizer.json" if folder is not None else None
    if folder is None or path is None or not path.is_file():
        return None
    return _loaded(folder, path.stat().st_mtime_ns)
