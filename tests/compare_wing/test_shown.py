"""Where a comparison is seen afterwards: the records, the dashboard, and trace sinks by an export."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbook
import offbook_compare
from offbook.client.connection.http import Api
from offbook.commands.main import run as command_line
from offbook.testing import LlmReply, LlmRequest, ScriptedServer, says, scripted_llm, scripted_server
from offbook.tracing.export import export_run
from offbook.tracing.jsonl import JsonlSink
from offbook_langfuse import LangfuseConnection, LangfuseSink, save_dataset
from tests.fakes.obedient_policy import obey
from tests.fakes.trace_server import PUBLIC, SECRET, TraceServer, trace_server

SCENARIOS = [{"id": word, "question": f"say {word}"} for word in ("blue", "teal", "gold")]
APP = """
import os
import offbook
from langchain_openai import ChatOpenAI
from offbook_langgraph import trainable

backend = offbook.RemoteBackend(os.environ["APP_SERVER"])


@trainable(model=offbook.TrainableModel(name="shown", base_model="tiny", backend=backend))
async def agent(scenario):
    answer = await ChatOpenAI(model="gpt-4.1").ainvoke(scenario["question"])
    return offbook.RewardResult(float(scenario["id"] in answer.text), {"success": float(scenario["id"] in answer.text)})
"""


def blue_only(request: LlmRequest) -> LlmReply:
    return says("I say blue.")


@pytest.fixture
def langfuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TraceServer]:
    """Langfuse by its variables, and delivery notes of this test's own."""
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "dir"))
    with trace_server() as served:
        monkeypatch.setenv("LANGFUSE_HOST", served.url)
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)
        yield served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(obey, tmp_path_factory.mktemp("shown")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: ScriptedServer) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in {"APP_SERVER": served.url, "OPENAI_API_KEY": "unused"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "shown_app.py").write_text(APP)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in SCENARIOS))
    return tmp_path


def test_every_candidate_is_a_run_in_the_dashboard_and_an_export_shows_it_in_langfuse(
    folder: Path, served: ScriptedServer, langfuse: TraceServer
) -> None:
    with scripted_llm(blue_only) as api:
        words = ["compare", "shown_app:agent", "--scenarios", "held_out.jsonl"]
        words += [
            "--with",
            "step:0",
            "--with",
            f"openai/big?name=my big&api_base={api.url}&prompt_price=1&completion_price=2",
        ]
        assert command_line(words) == 0
    run = json.loads((folder / "comparison" / "comparison.json").read_text())["run"]
    runs = (f"step-0-{run}", f"my-big-{run}")
    told: list[str] = []
    for each in runs:
        export_run(Api(served.url, None), each, [LangfuseSink(), JsonlSink(folder / "log")], say=told.append)
    sinks = ("langfuse", f"jsonl:{folder / 'log'}")
    assert told == [f"{sink}: 3 rollouts of run {each}" for each in runs for sink in sinks]

    assert langfuse.faults_found() == []
    agents = [span for span in langfuse.spans.values() if span.type == "agent"]
    sessions = Counter(span.attributes["langfuse.session.id"] for span in agents)
    assert sessions == {f"step-00000/{each}": 3 for each in runs}
    means = {
        score["sessionId"]: score["value"] for score in langfuse.scores.values() if score["name"] == "compare/success"
    }
    assert means == {f"step-00000/{runs[0]}": 1.0}  # the records have no means of a model that is not trained there
    calls = [span.attributes for span in langfuse.spans.values() if span.type == "generation"]
    assert Counter(own["langfuse.observation.model.name"] for own in calls) == {"shown": 3, "openai/big": 3}
    [big, *_] = [own for own in calls if own["langfuse.observation.model.name"] == "openai/big"]
    usage = json.loads(big["langfuse.observation.usage_details"])
    cost = (usage["input"] + 2 * usage["output"]) / 1e6
    assert json.loads(big["langfuse.observation.cost_details"]) == {"total": pytest.approx(cost)} and usage["output"]
    assert json.loads(big["langfuse.observation.input"])[0]["content"].startswith("say ")
    assert "langfuse.version" not in big and big["langfuse.trace.name"] == "my-big"
    said = [
        span.attributes["langfuse.observation.output"]
        for span in agents
        if runs[1] in span.attributes["langfuse.session.id"]
    ]
    assert all("I say blue." in each for each in said) and len(said) == 3
    evaluations = [json.loads(line) for line in (folder / "log" / "evaluations.jsonl").read_text().splitlines()]
    assert [(each["run"], each["split"]) for each in evaluations] == [(runs[0], "compare")]

    page = served.http.get("/").text
    for each in runs:
        assert each in page
        assert served.http.get(f"/runs/{each}").status_code == 200
    assert served.http.get("/compare", params={"run": runs}).status_code == 200


def test_an_exported_comparison_is_an_experiment_on_a_langfuse_dataset_for_each_candidate(
    folder: Path, served: ScriptedServer, langfuse: TraceServer
) -> None:
    import shown_app  # type: ignore[import-not-found]  # written by the fixture

    connection = LangfuseConnection(langfuse.url, PUBLIC, SECRET)
    save_dataset("words", SCENARIOS, expected="question", connection=connection)
    with scripted_llm(blue_only) as api:
        given = ["step:0", offbook.Model("big", inference_base_url=api.url, inference_api_key="k")]
        found = asyncio.run(offbook_compare.acompare(shown_app.agent, SCENARIOS, given, output=folder / "out"))
    for candidate in ("step-0", "big"):
        sink = LangfuseSink(connection, dataset="words")
        export_run(Api(served.url, None), f"{candidate}-{found.run}", [sink], say=lambda line: None)
    items = Counter(
        (span.attributes["langfuse.experiment.name"], span.attributes["langfuse.experiment.item.id"])
        for span in langfuse.spans.values()
        if span.type == "agent"
    )
    names = [f"shown step 0 compare (step-0-{found.run})", f"big compare (big-{found.run})"]
    assert items == {(name, each["id"]): 1 for name in names for each in SCENARIOS}
