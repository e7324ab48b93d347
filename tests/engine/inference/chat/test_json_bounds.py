"""Forced JSON comes to an end: strings, numbers and lists of a policy that knows none are closed at a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import torch

from offbook.base.types import Json
from offbook.engine.inference.chat.grammar import JsonBounds
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import DEADLINE
from tests.engine.inference.served import chat, served

OPEN_ENDED: Json = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "integer"},
        "rest": {"type": "array", "items": {"type": "array"}},
    },
    "required": ["note", "tags", "size", "rest"],
}


@pytest.fixture(scope="module")
def bounded(policy: ModelRunner) -> Iterator[httpx.Client]:
    """The engine with bounds that its context has room for."""
    with served(policy, max_string=20, max_items=6) as url, httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


def characters(text: str) -> int:
    """How many there are, without those that stand for bytes that are none: this model samples bytes."""
    return len(text.replace("\ufffd", ""))


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_to_an_open_schema_ends(bounded: httpx.Client, seed: int) -> None:
    wanted: Json = {"type": "json_schema", "json_schema": {"name": "answer", "schema": OPEN_ENDED}}
    answer = chat(bounded, response_format=wanted, seed=seed, max_tokens=440)["choices"][0]
    assert answer["finish_reason"] == "stop"
    found = json.loads(answer["message"]["content"])
    assert characters(found["note"]) <= 20
    assert len(found["tags"]) <= 6
    assert all(characters(tag) <= 20 for tag in found["tags"])


@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_of_an_open_tool_ends(bounded: httpx.Client, seed: int) -> None:
    tool: Json = {"type": "function", "function": {"name": "note", "parameters": OPEN_ENDED}}
    answer = chat(bounded, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=440)[
        "choices"
    ][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert characters(json.loads(call["function"]["arguments"])["note"]) <= 20


TEXTS = [b'"', b'",', b"ab", b",", b"]", b"}", b"[", b'", "', b"\\", b"1", b" ", b'{"', "é".encode()]


def kept(*sampled: bytes, max_string: int = 4, max_items: int = 3) -> set[bytes]:
    """The tokens that may follow these."""
    state = JsonBounds(TEXTS, max_string, max_items).begin()
    for text in sampled:
        state.accept(TEXTS.index(text))
    left = torch.isfinite(state.apply(torch.zeros(len(TEXTS))))
    return {text for text, stays in zip(TEXTS, left.tolist(), strict=True) if stays}


def test_a_string_at_its_bound_is_closed() -> None:
    every = set(TEXTS)
    assert kept(b'"', b"ab") == every
    assert kept(b'"', b"ab", b"ab") == {b'"', b'",', b'", "'}
    assert kept(b'"', b"ab", "é".encode(), b"1") == {b'"', b'",', b'", "'}  # a character of two bytes is one
    assert kept(b'"', b"ab", b"1", b"\\") == every  # an escape is never cut in two
    assert kept(b'"', b"ab", b"ab", b'"') == every


def test_a_list_at_its_bound_takes_no_more_items() -> None:
    assert kept(b"[", b"1", b",", b"1") == set(TEXTS)
    outside = {b",", b"[", b'{"'}
    assert kept(b"[", b"1", b",", b"1", b",") == set(TEXTS) - outside - {b'",', b'", "'} | {b'",', b'", "'}
    assert kept(b"[", b"1", b",", b"1", b",", b'"') == set(TEXTS) - {b'",', b'", "'}


def test_a_number_at_its_bound_has_no_more_digits() -> None:
    assert kept(*[b"1"] * 39) == set(TEXTS)
    assert kept(*[b"1"] * 40) == set(TEXTS) - {b"1"}


def test_where_nothing_else_is_allowed_a_bound_gives_way() -> None:
    state = JsonBounds([b",", b"["], 4, 1).begin()
    state.accept(1)
    only = torch.tensor([-torch.inf, 1.0])
    assert torch.equal(state.apply(only), only)
