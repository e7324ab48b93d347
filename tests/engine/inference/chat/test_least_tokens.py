"""How many tokens a text has at least: never more than it really has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from offbook import tiny
from offbook.engine.inference.chat.template import LeastTokens

TINY: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny.path())
LEAST = LeastTokens(TINY)
PIECES = [
    "<|im_start|>",
    "<tool_call>",
    " the",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "\u0390",
    "\ud55c",
    "\U0001f600",
    "\n\n",
    "é",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=60).map("".join))
def test_a_text_has_no_fewer_tokens(text: str) -> None:
    assert LEAST.of(text) <= len(TINY.encode(text, add_special_tokens=False))


def test_the_bound_is_the_longest_token() -> None:
    longest = max(TINY.get_vocab(), key=len)
    assert LEAST.of(longest * 10) == 10 == len(TINY.encode(longest * 10, add_special_tokens=False))
    assert LEAST.of(longest * 10 + "x") == 11


def test_composed_characters_are_counted_as_what_they_may_become() -> None:
    longest = max(map(len, TINY.get_vocab()))
    assert LEAST.of("e\u0301" * 2 * longest) == 1 < LEAST.of("ee" * 2 * longest)


def byte_level(*, alphabet: bool = True, **options: object) -> PreTrainedTokenizerBase:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else ["a", "b"]
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def strips(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.add_tokens([AddedToken("<mark>", lstrip=True)])  # type: ignore[list-item]  # transformers re-exports this very class
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (byte_level(alphabet=False), "z" * 100),
        (byte_level(normalizer=normalizers.Strip()), " " * 100),
        (byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), " " * 100),
        (
            byte_level(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            ),
            " " * 100,
        ),
        (strips(byte_level()), " " * 100 + "<mark>"),
    ],
)
def test_nothing_is_said_of_a_tokenizer_that_drops_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert len(tokenizer.encode(text, add_special_tokens=False)) < 10  # it does drop
    assert LeastTokens(tokenizer).of(text) == 0


def test_the_tests_own_tokenizer_is_known(folder: Path) -> None:
    assert LeastTokens(AutoTokenizer.from_pretrained(folder)).of("x" * 1300) == 100


def test_a_tokenizer_that_spells_unknown_characters_in_bytes_is_known() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "a b é" * 60
    assert 0 < LeastTokens(fast).of(text) <= len(fast.encode(text, add_special_tokens=False))
