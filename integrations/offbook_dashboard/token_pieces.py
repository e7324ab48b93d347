"""Converts single tokens to text with the base's tokenizer.json, without torch.

Bytes of an incomplete character are shown as bytes, because a token is shown as it was sampled, apart from its neighbours.
"""

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

from offbook import tiny
from offbook.base.local_bases import local_base
from offbook.base.types import Json

logger = logging.getLogger(__name__)

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenPiece:
    """The text of one token."""

    text: str
    special: bool = False  # markup of the tokenizer, such as the end of a turn


class TokenPieces:
    """Converts the tokens of one tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer.json of a model folder. Raises OSError or ValueError if it is missing or invalid."""
        text = (folder / "tokenizer.json").read_text("utf-8")
        contents = cast(dict[str, Json], json.loads(text))
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        self._byte_level = "ByteLevel" in json.dumps([contents.get("decoder"), contents.get("pre_tokenizer")])
        added = cast(list[dict[str, Json]], contents.get("added_tokens") or [])
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._known: dict[int, bytes | None] = {}

    def pieces(self, ids: Sequence[int]) -> list[TokenPiece]:
        """The pieces of these tokens, one per id."""
        return [self._piece(token) for token in ids]

    def _piece(self, token: int) -> TokenPiece:
        if token in self._added:
            return TokenPiece(self._added[token], special=True)
        raw = self._bytes(token)
        return TokenPiece(f"[id {token}]", special=True) if raw is None else TokenPiece(shown_bytes(raw))

    def text(self, ids: Sequence[int]) -> str:
        """The text of these tokens, with markup. Bytes that are not UTF-8 are shown as bytes."""
        parts = (self._added[id].encode() if id in self._added else self._bytes(id) or b"" for id in ids)
        return shown_bytes(b"".join(parts))

    def _bytes(self, token: int) -> bytes | None:
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
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        return text.replace(_SPACE, " ").encode()


def shown_bytes(raw: bytes) -> str:
    r"""Decode UTF-8, and show other bytes in hexadecimal.

    >>> shown_bytes(b"1 " + "€".encode()[:2])
    '1 \\xe2\\x82'
    """
    return raw.decode("utf-8", "backslashreplace")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in GPT-2's vocabulary: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=4)
def _loaded(folder: Path, changed: int) -> TokenPieces | None:
    del changed  # only a key of the cache
    try:
        return TokenPieces(folder)
    except (OSError, ValueError) as error:
        logger.warning("Showing tokens as ids, because the tokenizer cannot be read: %s", error)
        return None


def folder_of_base(name: str) -> Path | None:
    """The local folder of a base model's tokenizer; None if this machine has none. Downloads nothing."""
    if name in tiny.FOLDERS:
        return tiny.path(name)
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return folder
    if (base := local_base(name)) is not None:
        return base.folder
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # not a valid repository name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def pieces_of(folder: Path | None) -> TokenPieces | None:
    """The converter for a base model's folder; None without a readable tokenizer.json."""
    path = folder / "tokenizer.json" if folder is not None else None
    if folder is None or path is None or not path.is_file():
        return None
    return _loaded(folder, path.stat().st_mtime_ns)
