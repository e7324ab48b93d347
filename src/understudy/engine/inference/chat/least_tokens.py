"""How many tokens a text has at least, without tokenizing it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Set

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from ....types import Json

_NFC_SHRINKS = 4
"""The longest canonical decomposition of a character; NFC can at most undo it (Unicode Standard Annex 15)."""


class LeastTokens:
    """No token stands for more characters than the longest one has.

    That is a bound only where the tokenizer drops nothing of its text; of other tokenizers nothing is said.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary))  # byte-level tokens are spelled with a character per byte
        backend = getattr(tokenizer, "backend_tokenizer", None)
        facts: Json = json.loads(backend.to_str()) if backend is not None else None
        self._known = facts is not None and _keeps_all(facts, vocabulary.keys())
        self._composes = facts is not None and any(part["type"] == "NFC" for part in _parts(facts["normalizer"]))

    def of(self, text: str) -> int:
        """The least number of tokens of `text`; 0 where nothing is known."""
        if not self._known:
            return 0
        shrinks = _NFC_SHRINKS if self._composes and not unicodedata.is_normalized("NFC", text) else 1
        return -(-len(text) // (self._longest * shrinks))


def _keeps_all(facts: Json, vocabulary: Set[str]) -> bool:
    """Whether each character of a text ends in some token: every byte has one, and nothing is stripped or removed."""
    model: Json = facts["model"]
    splits, changes = _parts(facts["pre_tokenizer"]), _parts(facts["normalizer"])
    if any(part["type"] == "ByteLevel" for part in splits):
        bytes_kept = set(ByteLevel.alphabet()) <= vocabulary
    else:
        bytes_kept = bool(model.get("byte_fallback")) and {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary
    return (
        bytes_kept
        and model["type"] == "BPE"
        and not any(token["lstrip"] or token["rstrip"] for token in facts["added_tokens"])
        and all(part["type"] in ("NFC", "Prepend") or _is_space_mark(part) for part in changes)
        and all(part["type"] in ("ByteLevel", "Metaspace", "Digits") or _keeps_splits(part) for part in splits)
    )


def _keeps_splits(part: Json) -> bool:
    return part["type"] == "Split" and part["behavior"] != "Removed"


def _is_space_mark(part: Json) -> bool:
    return part["type"] == "Replace" and part["pattern"] == {"String": " "} and len(part["content"]) == 1


def _parts(component: Json) -> list[Json]:
    """The parts of a normalizer or pre-tokenizer, whether it is none, one, or a sequence."""
    if component is None:
        return []
    nested = component.get("normalizers") or component.get("pretokenizers")
    return nested if component["type"] == "Sequence" else [component]
