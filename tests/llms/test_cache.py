"""The cache on disk: a second run asks nobody, also after a kill, also from two processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from offbook.base.errors import LlmError, StoreError
from offbook.llms import Llm, Tokens, budget
from offbook.llms.cache import AnswerCache, StoredAnswer, question_key
from offbook.testing import LlmReply, LlmRequest, ScriptedLlm, cuts, fails, refuses, says, scripted_llm

from .asking import GOOD, HELLO, Verdict, llm_at

SCORING = """
import asyncio, sys
from tests.llms.asking import Verdict
from offbook.llms import Llm

async def main(url, cache, count):
    llm = Llm("openai/judge", api_base=url, cache=cache)
    asked = [llm.ask([{"role": "user", "content": f"group {n}"}], Verdict) for n in range(int(count))]
    answers = [await question for question in asked]
    print([answer.value.score for answer in answers], sum(answer.cached for answer in answers), "litellm" in sys.modules)

asyncio.run(main(*sys.argv[1:]))
"""


def score_of(request: LlmRequest) -> LlmReply:
    """The number of the group, as the score."""
    return says(json.dumps({"score": float(request.messages[0]["content"].split()[-1])}), seconds=0.2)


def scoring(endpoint: ScriptedLlm, cache: Path, count: int) -> subprocess.Popen[str]:
    """Another process that has `count` groups scored."""
    words = [sys.executable, "-c", SCORING, endpoint.url, str(cache), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


async def scored(endpoint: ScriptedLlm, cache: Path, count: int) -> tuple[int, list[float]]:
    """The same in this process."""
    llm = llm_at(endpoint, cache=cache)
    questions = [llm.ask([{"role": "user", "content": f"group {n}"}], Verdict) for n in range(count)]
    answers = await asyncio.gather(*questions)
    return sum(answer.cached for answer in answers), [answer.value.score for answer in answers]


async def test_a_second_run_asks_nobody_and_costs_nothing(tmp_path: Path) -> None:
    with scripted_llm([says('{"grade": 1}'), says(f"So: {GOOD}")]) as endpoint:
        first = await llm_at(endpoint, cache=tmp_path / "a.sqlite").ask(HELLO, Verdict)
        with budget() as spent:
            second = await llm_at(endpoint, cache=tmp_path / "a.sqlite").ask(HELLO, Verdict)
    assert len(endpoint.requests) == 2
    assert (second.value, second.text, second.tokens) == (first.value, first.text, Tokens(20, 10))
    assert (first.cached, second.cached, second.cost, second.repairs) == (False, True, 0.0, first.repairs)
    assert (spent.total.questions, spent.total.cached, spent.total.requests) == (1, 1, 0)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_a_run_after_a_kill_asks_only_for_what_was_not_answered(tmp_path: Path) -> None:
    fourth, release = threading.Event(), threading.Event()

    def script(request: LlmRequest) -> LlmReply:
        if request.messages[0]["content"] == "group 3" and not fourth.is_set():
            fourth.set()
            return says(GOOD, until=release)
        return score_of(request)

    with scripted_llm(script) as endpoint:
        process = scoring(endpoint, tmp_path / "a.sqlite", 6)
        assert fourth.wait(120)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        release.set()
        before = len(endpoint.requests)
        assert await scored(endpoint, tmp_path / "a.sqlite", 6) == (3, [0, 1, 2, 3, 4, 5])
        assert (before, len(endpoint.requests)) == (4, 7)
        assert await scored(endpoint, tmp_path / "a.sqlite", 6) == (6, [0, 1, 2, 3, 4, 5])
        assert len(endpoint.requests) == 7


async def test_equal_questions_at_the_same_time_are_one_request(tmp_path: Path) -> None:
    with scripted_llm([says(GOOD, seconds=0.1)]) as endpoint:
        llm = llm_at(endpoint, cache=tmp_path / "a.sqlite")
        answers = await asyncio.gather(*(llm.ask(HELLO, Verdict) for _ in range(5)))
    assert len(endpoint.requests) == 1
    assert sorted(answer.cached for answer in answers) == [False, True, True, True, True]


async def test_who_waits_for_a_question_that_is_cancelled_asks_it(tmp_path: Path) -> None:
    with scripted_llm([says(GOOD, seconds=5), says(GOOD)]) as endpoint:
        llm = llm_at(endpoint, cache=tmp_path / "a.sqlite")
        first = asyncio.create_task(llm.ask(HELLO, Verdict))
        async with asyncio.timeout(20):
            while not endpoint.requests:
                await asyncio.sleep(0.01)
        second = asyncio.create_task(llm.ask(HELLO, Verdict))
        await asyncio.sleep(0.2)  # it looks into the cache and waits
        first.cancel()
        assert (await second).value.score == 0.5
    assert len(endpoint.requests) == 2


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.one_of(st.binary(max_size=3), st.sampled_from([b"[" * 9_999, b"\xff", b'"', b"null"]))
)
def test_a_damaged_answer_is_asked_for_again(place: int, damage: bytes) -> None:
    """A foreign byte, a cut, or something else in the middle: never another answer, and never the end of the run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.sqlite"
        key, answer = question_key({"question": "a"}), StoredAnswer(GOOD, Tokens(20, 10), 0, "judge-1")
        cache = AnswerCache(path)
        asyncio.run(cache.put(key, answer))
        with closing(sqlite3.connect(path)) as database, database:
            (row,) = database.execute("SELECT CAST(answer AS BLOB) FROM answers").fetchone()
            place %= len(row)
            changed = (
                row[:place] + damage + (row[place + 1 :] if len(damage) == 1 else b"" if not damage else row[place:])
            )
            database.execute("UPDATE answers SET answer = CAST(? AS TEXT)", (changed,))
        assert asyncio.run(cache.get(key)) in (None, answer)
        asyncio.run(cache.put(key, answer))
        assert asyncio.run(cache.get(key)) == answer


def test_an_answer_that_an_earlier_version_stored_is_still_good(tmp_path: Path) -> None:
    cache, key = AnswerCache(tmp_path / "a.sqlite"), question_key({"question": "a"})
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database, database:
        row = {"text": GOOD, "tokens": [20, 10], "repairs": 0, "served_model": None}
        database.execute("INSERT INTO answers VALUES (?, ?, '')", (key, json.dumps(row)))
    assert asyncio.run(cache.get(key)) == StoredAnswer(GOOD, Tokens(20, 10), 0, None)


async def test_a_locked_cache_is_no_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook.llms.cache.BUSY", 0.05)
    cache = AnswerCache(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA journal_mode=DELETE")
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"database is locked\. Look at the disk, or give cache= another"):
            await cache.get(question_key({"question": "a"}))
    (tmp_path / "b.sqlite").write_bytes(b"no database" * 999)
    with pytest.raises(StoreError, match="damaged or no cache: delete it"):
        AnswerCache(tmp_path / "b.sqlite")


@pytest.mark.parametrize("reply", [refuses("no"), cuts(GOOD), says(None), says("no JSON"), fails(400), fails(401)])
async def test_only_good_answers_are_kept(reply: LlmReply, tmp_path: Path) -> None:
    with scripted_llm([reply]) as endpoint:
        llm = llm_at(endpoint, cache=tmp_path / "a.sqlite")
        with pytest.raises(LlmError):
            await llm.ask(HELLO, Verdict)
        asked = len(endpoint.requests)
        with pytest.raises(LlmError):
            await llm.ask(HELLO, Verdict)
    assert len(endpoint.requests) == 2 * asked


async def test_whatever_may_change_the_answer_is_another_question(tmp_path: Path) -> None:
    class Longer(BaseModel):
        score: float
        why: str = ""

    cache: dict[str, Any] = {"cache": tmp_path / "a.sqlite"}
    with scripted_llm([says(GOOD)]) as endpoint, scripted_llm([says(GOOD)]) as other:
        await llm_at(endpoint, **cache).ask(HELLO, Verdict)
        questions = [
            llm_at(other, **cache).ask(HELLO, Verdict),
            llm_at(endpoint, "openai/other", **cache).ask(HELLO, Verdict),
            llm_at(endpoint, temperature=0.5, **cache).ask(HELLO, Verdict),
            llm_at(endpoint, extra_body={"top_k": 3}, **cache).ask(HELLO, Verdict),
            llm_at(endpoint, **cache).ask(HELLO, Longer),
            llm_at(endpoint, **cache).ask([*HELLO, *HELLO], Verdict),
            llm_at(endpoint, **cache).ask(HELLO, Verdict, sample=1),
            llm_at(endpoint, **cache).ask_text(HELLO),
        ]
        assert not any([(await question).cached for question in questions])
        assert (await llm_at(endpoint, api_key="another-key", timeout=9.0, **cache).ask(HELLO, Verdict)).cached
        assert (await llm_at(endpoint, **cache).ask(HELLO, Verdict, purpose="comparison", sample=1)).cached


async def test_the_address_from_the_environment_is_part_of_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-environment")
    llm = Llm("openai/judge", cache=tmp_path / "a.sqlite")
    for number in range(2):
        with scripted_llm([says(GOOD)]) as endpoint:
            monkeypatch.setenv("OPENAI_API_BASE", endpoint.url)
            answer = await llm.ask(HELLO, Verdict)
        assert (answer.cached, len(endpoint.requests)) == (False, 1), number


async def test_an_answer_that_a_newer_check_rejects_is_asked_for_again(tmp_path: Path) -> None:
    def low(verdict: Verdict) -> None:
        if verdict.score > 0.4:
            raise ValueError("too high")

    with scripted_llm([says(GOOD), says('{"score": 0.1}')]) as endpoint:
        llm = llm_at(endpoint, cache=tmp_path / "a.sqlite")
        await llm.ask(HELLO, Verdict)
        assert (await llm.ask(HELLO, Verdict, check=low)).value.score == 0.1
        assert (await llm.ask(HELLO, Verdict, check=low)).cached
    assert len(endpoint.requests) == 2


async def test_the_file_is_the_users_alone_and_holds_json_and_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "new" / "folder"))
    with scripted_llm([says(GOOD)]) as endpoint:
        llm = Llm("openai/judge", api_base=endpoint.url)
        await llm.ask([{"role": "user", "content": "a private matter"}], Verdict)
    file = tmp_path / "new" / "folder" / "llms.sqlite"
    assert llm.options.cache == file
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()} == {0o600}
    [(key, answer)] = sqlite3.connect(file).execute("SELECT key, answer FROM answers").fetchall()
    assert (len(key), json.loads(answer)["text"]) == (64, GOOD)
    assert all(b"private" not in path.read_bytes() for path in file.parent.iterdir())


async def test_a_file_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database, " * 100)
    (tmp_path / "file").touch()
    with scripted_llm([says(GOOD)]) as endpoint:
        for path in (broken, tmp_path / "file" / "a.sqlite"):
            with pytest.raises(StoreError, match=f"cache: {path}.*None"):
                await llm_at(endpoint, cache=path).ask(HELLO, Verdict)
    assert endpoint.requests == []


async def test_an_answer_that_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.sqlite"

    def script(request: LlmRequest) -> LlmReply:
        sqlite3.connect(path).execute("DROP TABLE answers")
        return says(GOOD)

    with scripted_llm(script) as endpoint:
        assert (await llm_at(endpoint, cache=path).ask(HELLO, Verdict)).value.score == 0.5
    assert "an answer was not stored in the cache" in caplog.text
