"""Scores that people gave in Langfuse are feedback on the rollouts whose traces they scored: late, changed and twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from langfuse.api import LangfuseAPI
from langfuse.api.scores import CreateScoreRequest

from offbook.base.errors import ConfigError, OffbookError
from offbook.base.wire import TrajectoryRecord
from offbook.commands import main as cli
from tests.fakes.trace_server import PUBLIC, SECRET, TraceServer, trace_server

from .conftest import Opening, Passing


@dataclass
class People:
    """Who score in Langfuse, by its own client."""

    server: TraceServer
    http: httpx.Client

    def score(self, **fields: Any) -> None:
        api = LangfuseAPI(base_url=self.server.url, username=PUBLIC, password=SECRET, httpx_client=self.http)
        api.scores.create(request=[CreateScoreRequest(**fields)])

    def trace_of(self, thread: str) -> str:
        [trace] = {
            span.trace for span in self.server.spans.values()
            if span.attributes["langfuse.trace.metadata.rollout.thread_id"] == thread
        }  # fmt: skip
        return trace

    def observation(self, thread: str, kind: str, number: int = 0) -> str:
        spans = self.server.traces()[self.trace_of(thread)]
        return [span.id for span in spans if span.type == kind][number]


@pytest.fixture
def people(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[People]:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "notes"))
    with trace_server(scores_as_list=True) as server, httpx.Client(timeout=20) as http:
        monkeypatch.setenv("LANGFUSE_BASE_URL", server.url)
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)
        yield People(server, http)


async def command(route: Passing, *words: str) -> None:
    cli.add_plugged_commands()
    line = [*words, "--url", route.url]
    await asyncio.to_thread(cli.app, line, standalone_mode=False)


async def export(route: Passing, *threads: str) -> None:
    """Record two calls of each thread, and send them to Langfuse."""
    for thread in threads:
        for _ in range(2):
            await route.chat(thread=thread)
    await route.gateway.traffic.settled()
    await command(route, "traces", "export", "--run", "route/desk")


async def stored(route: Passing) -> dict[str, TrajectoryRecord]:
    return {str(each.record.metadata["thread_id"]): each.record for each in await route.threads()}


async def test_scores_of_traces_and_generations_are_feedback_and_come_again_without_a_change(
    passing: Opening, people: People, capsys: pytest.CaptureFixture[str]
) -> None:
    async with passing() as route:
        await export(route, "t-1", "t-2", "t-3", "t-4")
        people.score(name="thumbs", value=1, data_type="BOOLEAN", trace_id=people.trace_of("t-1"), comment="thanks")
        people.score(name="thumbs", value=0.25, source="ANNOTATION", trace_id=people.trace_of("t-2"), id="first")
        inner = {"trace_id": people.trace_of("t-3"), "observation_id": people.observation("t-3", "generation", 1)}
        people.score(name="thumbs", value=0.5, **inner)
        root = {"trace_id": people.trace_of("t-4"), "observation_id": people.observation("t-4", "agent")}
        people.score(name="thumbs", value=0.75, **root)
        people.score(name="helpful", value=9, trace_id=people.trace_of("t-1"))
        people.server.scores["judge"] = {**people.server.scores["first"], "id": "judge", "source": "EVAL", "value": 7}
        capsys.readouterr()
        await command(route, "scores", "--name", "thumbs")
        assert capsys.readouterr().out == "thumbs: 4 scores new or changed, 0 as before\n"
        threads = await stored(route)
        assert {name: record.reward for name, record in threads.items()} == {
            "t-1": 1.0, "t-2": 0.25, "t-3": 0.5, "t-4": 0.75,
        }  # fmt: skip
        assert threads["t-1"].metadata["feedback"]["score"]["comment"] == "thanks"
        [calls] = [each.calls for each in await route.threads() if each.record.id == threads["t-3"].id]
        assert list(threads["t-3"].metadata["feedback"]) == [f"score {calls[1].id}"]
    async with passing() as route:  # the same directory, after a restart
        await command(route, "scores", "--name", "thumbs")
        assert capsys.readouterr().out == "thumbs: 0 scores new or changed, 4 as before\n"
        assert await stored(route) == threads
        people.score(name="thumbs", value=0, trace_id=people.trace_of("t-2"), id="first")  # changed
        people.score(name="thumbs", value=0, trace_id=people.trace_of("t-1"))  # another person, later
        await command(route, "scores", "--name", "thumbs")
        assert capsys.readouterr().out == "thumbs: 2 scores new or changed, 2 as before\n"
        await command(route, "scores", "--name", "helpful", "--as", "stars")
        threads = await stored(route)
        assert [threads[name].reward for name in ("t-1", "t-2", "t-3")] == [0.0, 0.0, 0.5]
        assert threads["t-1"].metrics == {"feedback/score": 0.0, "feedback/stars": 9.0}


async def test_what_an_export_sent_is_no_feedback(
    passing: Opening, people: People, capsys: pytest.CaptureFixture[str]
) -> None:
    async with passing() as route:
        await export(route, "t-1")
        people.score(name="thumbs", value=1, trace_id=people.trace_of("t-1"))
        await command(route, "scores", "--name", "thumbs")
        await command(route, "traces", "export", "--run", "route/desk")  # now with its reward
        capsys.readouterr()
        await command(route, "scores", "--name", "reward")
        assert [score["name"] for score in people.server.scores.values()].count("reward") == 1
        assert capsys.readouterr().out == "reward: 0 scores new or changed, 0 as before\n"


async def test_scores_that_find_no_rollout_are_named_and_the_others_stored(
    passing: Opening, people: People, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with passing(max_bytes=1) as route:
        await export(route, "gone")
        await route.gateway.traffic.retain()
    async with passing() as route:
        await export(route, "t-1")
        people.score(name="thumbs", value=1, trace_id=people.trace_of("gone"))
        people.score(name="thumbs", value=1, trace_id="f" * 32)
        people.score(name="thumbs", value=1, session_id="step-00000/route/desk")
        people.score(name="thumbs", value=1, trace_id=people.trace_of("t-1"), observation_id="e" * 16)
        people.score(name="thumbs", value=1, trace_id=people.trace_of("t-1"))
        capsys.readouterr()
        await command(route, "scores", "--name", "thumbs")
        first, *left_out = capsys.readouterr().out.splitlines()
        assert first == "thumbs: 1 score new or changed, 0 as before"
        assert left_out[0].startswith(f"  left out: trace {people.trace_of('gone')}: no trajectory 'thread-")
        assert left_out[1] == (
            f"  left out: trace {people.trace_of('t-1')}: observation {'e' * 16} is no model call; "
            "score the trace or one of its generations"
        )
        assert left_out[2:] == [f"  left out: 2 scores of what Offbook did not send, such as {'f' * 32}"]
        assert (await stored(route))["t-1"].reward == 1.0


async def test_categories_need_their_numbers(passing: Opening, people: People) -> None:
    async with passing() as route:
        await export(route, "t-1")
        people.score(name="mood", value="good", data_type="CATEGORICAL", trace_id=people.trace_of("t-1"))
        with pytest.raises(
            ConfigError, match=r"'mood' of trace \w+ is 'good', which is not a number.*--value 'good=1'"
        ):
            await command(route, "scores", "--name", "mood", "--value", "bad=0")
        assert (await stored(route))["t-1"].reward is None
        await command(route, "scores", "--name", "mood", "--value", "bad=0", "--value", "good=0.5")
        assert (await stored(route))["t-1"].reward == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "a,b"], "--name: the name of one score is needed"),
        (["--name", "thumbs", "--value", "good"], "--value: 'good' is not of the form CATEGORY=NUMBER"),
        (["--name", "thumbs", "--as", "my stars"], "--as: String should match pattern"),
        (["--name", "big"], "score 10000000.0 of trace"),
    ],
)
async def test_wrong_options_and_numbers_are_named(
    passing: Opening, people: People, words: list[str], message: str
) -> None:
    async with passing() as route:
        await export(route, "t-1")
        for name, value in (("thumbs", 1.0), ("big", 1e7)):
            people.score(name=name, value=value, trace_id=people.trace_of("t-1"))
        with pytest.raises(ConfigError, match=message):
            await command(route, "scores", *words)


async def test_a_langfuse_that_is_away_is_named(
    passing: Opening, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGFUSE_BASE_URL", "http://127.0.0.1:9")
    async with passing() as route:
        with pytest.raises(OffbookError, match=r"no answer from Langfuse at http://127\.0\.0\.1:9 .* run this again"):
            await command(route, "scores", "--name", "thumbs")
