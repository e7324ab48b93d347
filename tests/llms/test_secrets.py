"""Keys reach the provider's header and nothing else: no log, no error, no file, no report."""

from __future__ import annotations

import logging
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import BudgetExceeded, LlmError
from offbook.base.redaction import MARK, redact
from offbook.llms import budget
from offbook.testing import LlmReply, LlmRequest, fails, says, scripted_llm

from .asking import HELLO, Verdict, llm_at

OPTION = "canary+option/4711="
HEADER = "canary-header-4711"
ENVIRONMENT = "canary-environment-4711"
CANARIES = (OPTION, HEADER, ENVIRONMENT, "canary%2Boption")


def leaks(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


def echo(request: LlmRequest) -> LlmReply:
    """What a careless server says: the credentials that it was sent, in body and header."""
    said = f"{request.headers['authorization']} and {request.headers.get('x-api-key')} and {ENVIRONMENT}"
    if request.messages[0]["content"] == "answer":
        return says(f'{{"score": 0.5, "why": "{said}"}}' if "schema" in str(request.body) else said)
    status = int(request.messages[0]["content"])
    return fails(status, f"you sent {said}", headers={"x-echo": said, "retry-after": "0"})


def told(error: BaseException) -> str:
    """Everything that an error shows, with what is behind it."""
    chain = [error, error.__cause__, error.__context__]
    texts = [f"{part!r} {part} {getattr(part, '__notes__', '')}" for part in chain if part is not None]
    return "\n".join([*texts, *traceback.format_exception(error)])


def every_local(error: BaseException) -> str:
    """The locals of every frame, as tools that capture them would write them down."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "\n".join(repr(frame.f_locals) for frame in frames if "offbook/llms" in frame.f_code.co_filename)


@pytest.mark.parametrize("model", ["openai/judge", "hosted_vllm/judge"])
async def test_a_key_that_the_provider_echoes_is_shown_nowhere(
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_PROVIDER_API_KEY", ENVIRONMENT)
    caplog.set_level(logging.DEBUG)
    options: dict[str, Any] = {
        "api_key": OPTION,
        "extra_headers": {"x-api-key": HEADER},
        "cache": tmp_path / "a.sqlite",
    }
    shown: list[str] = []
    with scripted_llm(echo) as endpoint, budget() as spent:
        llm = llm_at(endpoint, model, **options)
        for status in (400, 401, 404, 429, 500):
            with pytest.raises(LlmError, match="you sent") as raised:
                await llm.ask([{"role": "user", "content": str(status)}], Verdict)
            shown += [told(raised.value), every_local(raised.value)]
        with pytest.raises(LlmError) as raised:  # an answer that does not fit is told in the error
            await llm.ask([{"role": "user", "content": "answer"}], Verdict)
        shown.append(str(raised.value))
        await llm.ask_text([{"role": "user", "content": "answer"}])
    assert endpoint.requests[0].headers["authorization"] == f"Bearer {OPTION}"
    assert endpoint.requests[0].headers["x-api-key"] == HEADER
    shown += [record.getMessage() + str(record.args) for record in caplog.records]
    shown += [repr(llm), repr(llm.options.api_key), *spent.lines(), str(spent.metrics()), *capfd.readouterr()]
    shown += [path.read_bytes().decode("utf-8", "replace") for path in tmp_path.iterdir()]
    assert [leaks(text) for text in shown if leaks(text)] == []
    assert MARK in shown[0] and len(caplog.records) > 5


def test_a_key_is_redacted_also_where_its_form_alone_gives_it_away() -> None:
    text = "Authorization: Bearer abcdefghijklmnop, sk-proj-abcdefghijklm1nopqrstuvwx, AIzaSyA1234567890123456789012345678901"
    assert redact(text) == f"Authorization: {MARK}, {MARK}, {MARK}"
    plain = "the bearer of bad news; sk-learn-and-other-long-names; a key-value-store-of-some-kind"
    assert redact(plain) == plain


async def test_an_answer_that_shows_a_key_is_used_and_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_llm(echo) as endpoint:
        llm = llm_at(endpoint, api_key=OPTION, cache=tmp_path / "a.sqlite")
        answers = [await llm.ask_text([{"role": "user", "content": "answer"}]) for _ in range(2)]
    assert [(OPTION in answer.value, answer.cached) for answer in answers] == [(True, False)] * 2
    assert "is not stored in the cache" in caplog.text


@pytest.mark.parametrize("error", [LlmError("late", kind="timeout"), BudgetExceeded("spent", max_cost=2.0, spent=2.5)])
def test_errors_cross_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


async def test_a_short_placeholder_is_no_secret() -> None:
    words = "none of this is EMPTY"
    with scripted_llm([fails(400, words)]) as endpoint, pytest.raises(LlmError, match=words):
        await llm_at(endpoint, api_key="EMPTY").ask(HELLO, Verdict)
