"""What is exported is read back through Langfuse's own client: from the stand-in always, and from the Langfuse project of
LANGFUSE_BASE_URL, LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY where all three are set (`pytest -m langfuse`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import pytest
from langfuse.api import LangfuseAPI
from langfuse.api.prompts import CreateTextPromptRequest

from offbook import Scenario
from offbook.base.types import ToolRun, new_id
from offbook.base.wire import RolloutTrace
from offbook.contracts import EvaluationFinished, GroupsFinished, StepFinished
from offbook.testing.sinks import START, sample_rollout
from offbook_langfuse import (
    LangfuseConnection,
    LangfuseSink,
    dataset_scenarios,
    managed_prompt,
    save_dataset,
    scenarios_from_traces,
)
from offbook_sinks.spans import trace_id
from tests.fakes.trace_server import PUBLIC, SECRET, trace_server, until

T = TypeVar("T")
VARIABLES = ("LANGFUSE_BASE_URL", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
MISSING = [name for name in VARIABLES if not os.environ.get(name)]
FIELDS = "core,basic,time,io,metadata,model,usage,prompt,trace_context"
BEGAN = datetime.fromtimestamp(START - 60, UTC)


@dataclass
class Project:
    """A Langfuse project. `seconds`: how long what was written may take until it is read; scores and experiments of a real
    server may take ten minutes."""

    connection: LangfuseConnection
    seconds: float
    run: str = field(default_factory=lambda: new_id("live"))

    def __post_init__(self) -> None:
        own = self.connection
        self.http = httpx.Client(timeout=20)
        self.api = LangfuseAPI(
            base_url=own.base_url, username=own.public_key, password=own.secret_key, httpx_client=self.http
        )
        self.environment = self.run[:40]

    @contextmanager
    def sink(self, **options: Any) -> Generator[LangfuseSink]:
        """A sink until the block ends."""
        sink = LangfuseSink(self.connection, environment=self.environment, **options)
        try:
            yield sink
        finally:
            sink.closed()

    def all(self, read: Callable[..., Any], **parameters: Any) -> list[Any]:
        """The items of every page."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            answer = read(**parameters, cursor=cursor)
            found += answer.data
            cursor = answer.meta.cursor
            if cursor is None:
                return found

    def awaited(self, read: Callable[[], list[T]], count: int) -> list[T]:
        """What is read as soon as there are so many."""
        found: list[list[T]] = []
        assert until(lambda: found.append(read()) or len(found[-1]) >= count, self.seconds), found[-1]
        assert len(found[-1]) == count, found[-1]
        return found[-1]

    def observations(self, rollout: RolloutTrace, count: int) -> list[Any]:
        trace = f"{trace_id(rollout):032x}"
        read = self.api.observations.get_many
        spans = self.awaited(lambda: self.all(read, trace_id=trace, fields=FIELDS, limit=100), count)
        return sorted(spans, key=lambda span: span.start_time)

    def scores(self, count: int, **of: str) -> dict[str, Any]:
        read = self.api.scores.get_many
        found = self.awaited(lambda: self.all(read, fields="details,subject", limit=100, **of), count)
        return {score.name: score for score in found}


@pytest.fixture(params=["stand-in", pytest.param("live", marks=pytest.mark.langfuse)])
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    if request.param == "live":
        if MISSING:
            pytest.skip(f"no live Langfuse: {', '.join(MISSING)} not set")
        live = Project(LangfuseConnection.from_environment(), 700.0)
        with live.http:
            yield live
        return
    with trace_server() as server:
        stand_in = Project(LangfuseConnection(server.url, PUBLIC, SECRET), 0.1)
        with stand_in.http:
            yield stand_in
        assert server.faults_found() == []


def rollouts(project: Project, split: str = "train") -> tuple[RolloutTrace, ...]:
    """Four rollouts of one group; a tool of the first was timed."""
    first, *others = (sample_rollout(index, run=project.run, split=split) for index in range(4))
    run = ToolRun(tool_call_id="tool-0", name="look_up", started_at=START + 0.35, ended_at=START + 0.45)
    metadata = {**first.record.metadata, "user_id": "ann", "prompt": "greet@3"}
    record = first.record.model_copy(update={"tool_runs": (run,), "metadata": metadata})
    call = first.calls[0].model_copy(update={"cost": 0.25, "first_token_at": START + 0.15})
    return (first.model_copy(update={"record": record, "calls": (call, *first.calls[1:])}), *others)


def plain(value: Any) -> Any:
    """An input or output, which comes as JSON text or as its value."""
    return json.loads(value) if isinstance(value, str) else value


def test_a_rollout_is_one_trace_also_when_it_is_exported_again(project: Project) -> None:
    several = rollouts(project)
    for _ in range(2):
        with project.sink(release="v7") as sink:
            sink.groups_finished(GroupsFinished(project.run, "train", 0, ("g",), several))
    root, node, call, tool, _, _ = project.observations(several[0], 6)
    assert [each.type for each in (root, node, call, tool)] == ["AGENT", "SPAN", "GENERATION", "TOOL"]
    assert (root.name, root.trace_name, root.is_root_observation) == ("shelves", "shelves", True)
    assert (root.version, root.release, root.user_id) == ("lora-step-0", "v7", "ann")
    assert root.session_id == f"step-00000/{project.run}" and root.environment == project.environment
    assert root.metadata["scenario"] == "box-0" and not {"attributes", "scope"} & root.metadata.keys()
    assert set(root.tags) == {"offbook", "split:train", "model:agent"}
    assert call.model == "agent" and call.usage_details["input"] == 40 and call.usage_details["output"] == 12
    assert call.cost_details["total"] == 0.25 and call.completion_start_time.timestamp() == pytest.approx(START + 0.15)
    if project.seconds < 1:  # a real server links only prompts that it has
        assert (call.prompt_name, call.prompt_version) == ("greet", 3)
    assert plain(call.input)["messages"][1]["content"] == "Where is box 0?"
    assert plain(call.input)["tools"][0]["function"]["name"] == "look_up"
    assert plain(node.input)["content"] == "Where is box 0?" and plain(node.output) == plain(call.output)
    assert plain(root.output)["content"] == "On shelf 7."
    assert (tool.name, plain(tool.input), plain(tool.output)) == ("look_up", {"box": 7}, "shelf 7")
    assert tool.parent_observation_id == root.id and call.parent_observation_id == node.id
    assert (tool.end_time - tool.start_time).total_seconds() == pytest.approx(0.1, abs=0.002)
    failed = project.observations(several[3], 4)
    assert (failed[0].level, failed[0].status_message) == ("ERROR", "TimeoutError: the tool is away")


def test_rewards_metrics_explanations_and_steps_are_scores(project: Project) -> None:
    several = rollouts(project)
    with project.sink() as sink:
        sink.groups_finished(GroupsFinished(project.run, "train", 0, ("g",), several))
        sink.step_finished(StepFinished(project.run, "agent", 1, 0, START + 9, {"reward": 0.5, "entropy": 1.5}))
    scores = project.scores(3, trace_id=f"{trace_id(several[1]):032x}")
    assert {name: score.value for name, score in scores.items()} == {
        "reward": 0.25,
        "success": 1.0,
        "ruler_score": 0.25,
    }
    assert scores["reward"].comment == "answer 1 is short"
    session = project.scores(2, session_id=f"step-00000/{project.run}")
    assert {name: score.value for name, score in session.items()} == {"reward": 0.5, "entropy": 1.5}


def test_low_scored_traces_come_back_as_scenarios(project: Project) -> None:
    several = rollouts(project)
    with project.sink() as sink:
        sink.groups_finished(GroupsFinished(project.run, "train", 0, ("g",), several))
    for each in several:
        project.observations(each, 6 if each.record.exception is None else 4)
    for each in several[:3]:
        project.scores(3, trace_id=f"{trace_id(each):032x}")
    found = scenarios_from_traces(
        environment=project.environment, low_score="reward<0.5", tags=["offbook"], connection=project.connection
    )
    assert {each.prompt for each in found} == {"Where is box 0?", "Where is box 1?"}
    assert all(each["answer"]["content"] == "On shelf 7." for each in found)


def test_a_dataset_comes_back_and_an_evaluation_is_an_experiment_on_it(project: Project) -> None:
    name = f"offbook-{project.run}"
    given = [
        Scenario.model_validate({"id": f"{project.run}-box-0", "prompt": "Where is box 0?", "answer": "7"}),
        {"id": f"{project.run}-box-1", "question": "And 1?", "expected": {"shelf": 4}},
        {"id": f"{project.run}-box-2", "question": "And 2?"},
    ]
    for _ in range(2):
        assert save_dataset(name, given, connection=project.connection) == 3
    back = {each.id: each for each in dataset_scenarios(name, connection=project.connection)}
    assert len(back) == 3
    assert back[f"{project.run}-box-0"]["answer"] == "7" and back[f"{project.run}-box-1"]["expected"] == {"shelf": 4}
    dataset = project.api.datasets.get(name)
    first = sample_rollout(0, run=project.run, split="val", step=2)
    place = first.record.place.model_copy(update={"scenario": f"{project.run}-box-0"})
    rollout = first.model_copy(update={"record": first.record.model_copy(update={"place": place})})
    evaluated = EvaluationFinished(project.run, "agent", "val", 2, START + 20, {"reward": 0.5}, ("v",))
    with project.sink(dataset=name) as sink:
        sink.groups_finished(GroupsFinished(project.run, "val", 2, ("v",), (rollout,)))
        sink.evaluation_finished(evaluated)
    experiment = f"agent step 2 val ({project.run})"
    read = project.api.experiments.list
    [found] = project.awaited(
        lambda: project.all(read, from_start_time=BEGAN, name=experiment, fields="core,metadata"), 1
    )
    assert (found.name, found.dataset_id, found.item_count) == (experiment, dataset.id, 1)
    assert found.description.startswith("Offbook evaluated agent step 2 on the split val")
    assert found.metadata["model"] == "agent" and found.metadata["split"] == "val"
    items = project.api.experiments.list_items
    [item] = project.awaited(lambda: project.all(items, from_start_time=BEGAN, experiment_name=experiment), 1)
    assert (item.trace_id, item.experiment_item_id) == (f"{trace_id(rollout):032x}", f"{project.run}-box-0")


def test_a_prompt_is_read_by_its_version(project: Project) -> None:
    name = f"offbook-{project.run}"
    for text in ("Hello {{name}}", "Good day {{name}}"):
        project.api.prompts.create(request=CreateTextPromptRequest(name=name, prompt=text))
    try:
        first = managed_prompt(name, version=1, connection=project.connection)
        second = managed_prompt(name, version=2, connection=project.connection)
    finally:
        project.api.prompts.delete(name)
    assert (first.version, first.compile(name="Ann")) == (1, "Hello Ann")
    assert (second.version, second.compile(name="Ann")) == (2, "Good day Ann")
