"""A lower bound for the number of tokens of a text, without tokenizing it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Set

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from offbook.base.types import Json

_NFC_SHRINKS = 4
"""Most characters that NFC composes into one: the longest canonical decomposition (Unicode Standard Annex 15)."""


class LeastTokens:
    """Computes the bound for one tokenizer, from the length of its longest token.

    The bound holds only if the tokenizer keeps every character of a text. For other tokenizers it is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary))  # byte-level tokens have one character per byte
        backend = getattr(tokenizer, "backend_tokenizer", None)
        facts: Json = json.loads(backend.to_str()) if backend is not None else None
        self._known = facts is not None and _keeps_all(facts, vocabulary.keys())
        self._composes = facts is not None and any(part["type"] == "NFC" for part in _parts(facts["normalizer"]))

    def of(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`; 0 if there is none."""
        if not self._known:
            return 0
        shrinks = _NFC_SHRINKS if self._composes and not unicodedata.is_normalized("NFC", text) else 1
        return -(-len(text) // (self._longest * shrinks))


def _keeps_all(facts: Json, vocabulary: Set[str]) -> bool:
    """Whether each character of a text becomes part of a token: every byte has a token, and nothing is removed."""
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
    """The parts of a normalizer or pre-tokenizer, which can be missing, a single part, or a sequence."""
    if component is None:
        return []
    nested = component.get("normalizers") or component.get("pretokenizers")
    return nested if component["type"] == "Sequence" else [component]
