"""Heavy requests: refused at once where they cannot be answered, given up in time, never in the way of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from offbook.base.types import Json
from offbook.engine.inference.chat import answer_shape as aside
from offbook.engine.inference.chat.answer_shape import MAX_BYTES, MAX_TOOLS
from offbook.engine.inference.chat.grammar import Grammars
from offbook.engine.inference.decoding.model import ModelRunner
from offbook.engine.inference.service import ChatRenderer
from tests.engine.inference.engines import CONTEXT, DEADLINE
from tests.engine.inference.served import body, chat, refused, served

LARGE: list[Json] = [{"role": "user", "content": "hi"}, {"role": "user", "content": "", "name": "x" * 20_000}]


class Hold:
    """Holds up the calls of methods whose first argument is large, until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.called, self.free = threading.Event(), threading.Event()

    def __call__(self, owner: type, name: str) -> None:
        real = getattr(owner, name)

        def waits(this: object, given: object, *more: object, **options: object) -> object:
            if len(str(given)) > 16_000:
                self.called.set()
                assert self.free.wait(DEADLINE)
            return real(this, given, *more, **options)

        self._monkeypatch.setattr(owner, name, waits)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    hold = Hold(monkeypatch)
    yield hold
    hold.free.set()


def shaped(schema: Json) -> dict[str, Json]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    http: httpx.Client, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, texts = policy.tokenizer.encode, list[str]()

    def noted(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return encode(text, **options)

    monkeypatch.setattr(policy.tokenizer, "encode", noted)
    reach = 4 * CONTEXT * max(map(len, policy.tokenizer.get_vocab()))
    error = refused(http, messages=[{"role": "user", "content": "x" * (reach + 1)}])
    assert error["param"] == "messages" and texts == []
    for words in (f"at most {CONTEXT} tokens", "--max-model-len", "shorten the prompt"):
        assert words in error["message"]
    error = refused(http, messages=[{"role": "user", "content": "x" * (reach // 4)}])  # may fit, as far as one knows
    assert "shorten the prompt by" in error["message"] and len(texts) == 1


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_more_tools_than_a_grammar_takes_are_refused_with_the_limit(
    http: httpx.Client, fields: dict[str, Json]
) -> None:
    tools = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(MAX_TOOLS + 1)]
    error = refused(http, tools=tools, **fields)
    assert error["param"] == "tools" and f"at most {MAX_TOOLS} tools (got {MAX_TOOLS + 1})" in error["message"]


def test_a_schema_larger_than_a_grammar_takes_is_refused_with_the_limit(http: httpx.Client) -> None:
    schema: Json = {"type": "object", "properties": {"text": {"enum": ["x" * MAX_BYTES]}}}
    error = refused(http, **shaped(schema))
    assert error["param"] == "response_format" and f"at most {MAX_BYTES} bytes" in error["message"]
    tool: Json = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = refused(http, tools=[tool], tool_choice="required")
    assert error["param"] == "tools" and f"at most {MAX_BYTES} bytes" in error["message"]


HELD = [
    (Grammars, "json_schema", shaped({"enum": ["x" * 20_000]}), "response_format"),
    (ChatRenderer, "prompt_ids", {"messages": LARGE}, "messages"),
]


@pytest.mark.parametrize(("owner", "name", "fields", "param"), HELD)
def test_what_takes_too_long_is_given_up_by_name(
    http: httpx.Client,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fields: dict[str, Json],
    param: str,
) -> None:
    monkeypatch.setattr(aside, "PATIENCE_SECONDS", 1.0)
    hold(owner, name)
    error = refused(http, **fields)
    assert error["param"] == param and error["message"].startswith(
        f"{'the ' if param == 'messages' else ''}{param} take"
    )
    assert "too long" in error["message"] and "given up after 1 s" in error["message"]


@pytest.mark.parametrize(("owner", "name", "fields", "param"), HELD)
def test_heavy_requests_hold_up_neither_health_nor_small_calls(
    policy: ModelRunner, hold: Hold, owner: type, name: str, fields: dict[str, Json], param: str
) -> None:
    with served(policy) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http, ThreadPoolExecutor(8) as threads:
        hold(owner, name)
        heavy = [threads.submit(http.post, "/v1/chat/completions", json=body(**fields)) for _ in range(8)]
        assert hold.called.wait(DEADLINE)
        assert http.get("/health", timeout=1.0).status_code == 200
        assert chat(http)["choices"]
        assert chat(http, **shaped({"type": "boolean"}))["choices"]
        assert not any(one.done() for one in heavy)
        hold.free.set()
