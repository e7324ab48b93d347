"""Every sink of ours holds the conformance suite, and shows what the events have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError
from offbook.contracts import DeliveryError, GroupsFinished, RejectedError, StepFinished, TraceSink
from offbook.testing.sinks import RUN, check_sink, sample_events, sample_rollout
from offbook.tracing.fanout import show
from offbook.tracing.sink_registry import resolve_sinks
from offbook_langfuse import LangfuseConnection, LangfuseSink
from offbook_sinks.otlp_sink import OtlpSink
from offbook_sinks.spans import (
    GAP,
    NO_RESULT,
    SpanKind,
    rollout_spans,
)
from tests.fakes.trace_server import PUBLIC, REPLIES, SECRET, TraceServer, trace_server


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with trace_server() as served:
        yield served


def connection(server: TraceServer, secret: str = SECRET) -> LangfuseConnection:
    return LangfuseConnection(server.url, PUBLIC, secret)


def shown(sink: TraceSink) -> None:
    for event in sample_events():
        show(sink, event)
    sink.closed()


def test_the_langfuse_sink_conforms(server: TraceServer) -> None:
    def kept() -> list[str]:
        return [*(" ".join(map(str, key)) for key in server.spans), *server.scores]

    check_sink(lambda: LangfuseSink(connection(server)), kept)
    assert server.faults_found() == []


def test_the_otlp_sink_conforms_over_http_and_needs_no_langfuse() -> None:
    with trace_server(langfuse=False) as server:
        check_sink(lambda: OtlpSink(server.endpoint), lambda: [" ".join(map(str, key)) for key in server.spans])
        assert server.faults_found() == []


def test_a_rollout_is_a_trace_with_its_calls_tools_scores_and_error(server: TraceServer) -> None:
    shown(LangfuseSink(connection(server)))
    traces = {spans[0].attributes["langfuse.trace.metadata.trajectory"]: spans for spans in server.traces().values()
              if "langfuse.trace.metadata.trajectory" in spans[0].attributes}  # fmt: skip
    assert len(traces) == 8 * 2 + 4 * 2
    root, node, call, tool, node_2, call_2 = traces[f"traj-{RUN}-train-0-1"]
    assert [each.type for each in (root, node, call, tool, node_2, call_2)] == [
        "agent", "span", "generation", "tool", "span", "generation",
    ]  # fmt: skip
    assert [each.parent for each in (node, call, tool, call_2)] == [root.id, node.id, root.id, node_2.id]
    own = call.attributes
    assert own["langfuse.session.id"] == f"step-00000/{RUN}" and own["langfuse.version"] == "lora-step-0"
    assert own["langfuse.observation.model.name"] == "agent" and own["langfuse.environment"] == "train"
    assert json.loads(own["langfuse.observation.usage_details"]) == {"input": 40, "output": 12, "total": 52}
    assert json.loads(own["langfuse.observation.model.parameters"])["temperature"] == 0.7
    assert own["langfuse.observation.metadata.call.logprob_mean"] == "-0.25"
    assert own["langfuse.trace.name"] == root.name == "shelves"
    assert json.loads(own["langfuse.observation.input"])["messages"][1]["content"] == "Where is box 1?"
    assert json.loads(node.attributes["langfuse.observation.input"])["content"] == "Where is box 1?"
    assert node.attributes["langfuse.observation.output"] == own["langfuse.observation.output"]
    assert (tool.name, json.loads(tool.attributes["langfuse.observation.input"])) == ("look_up", {"box": 7})
    assert json.loads(tool.attributes["langfuse.observation.output"]) == "shelf 7"
    assert tool.attributes["langfuse.observation.metadata.tool.timing"] == GAP
    assert json.loads(root.attributes["langfuse.observation.output"])["content"] == "On shelf 7."
    lost = traces[f"traj-{RUN}-train-0-3"]
    assert lost[0].error == "TimeoutError: the tool is away"
    assert lost[0].attributes["langfuse.observation.level"] == "ERROR"
    assert lost[-1].attributes["langfuse.observation.metadata.tool.timing"] == NO_RESULT
    mine = {score["name"]: score for score in server.scores.values() if score.get("traceId") == root.trace}
    assert {name: score["value"] for name, score in mine.items()} == {
        "reward": 0.25,
        "success": 1.0,
        "ruler_score": 0.25,
    }
    assert mine["reward"]["comment"] == mine["ruler_score"]["comment"] == "answer 1 is short"
    sessions = {
        (score["sessionId"], score["name"]): score["value"] for score in server.scores.values() if "sessionId" in score
    }
    assert sessions[f"step-00001/{RUN}", "reward"] == 1.25 and sessions[f"step-00000/{RUN}", "val/success"] == 0.25


def test_a_step_with_many_metrics_has_few_scores_and_one_of_them_holds_all_numbers(server: TraceServer) -> None:
    metrics = {"reward": 0.5, "kl/base": 0.01, "not/finite": float("nan")} | {f"layout/{i}": 1.0 for i in range(110)}
    sink = LangfuseSink(connection(server))
    sink.step_finished(StepFinished(RUN, "agent", 1, 0, 1.0, metrics))
    sink.closed()
    scores = {score["name"]: score for score in server.scores.values()}
    assert scores.keys() == {"reward", "kl/base"}
    assert scores["reward"]["metadata"]["metrics"] == {k: v for k, v in metrics.items() if k != "not/finite"}


def test_sessions_of_steps_and_of_candidates_differ_in_their_first_30_letters(server: TraceServer) -> None:
    sink = LangfuseSink(connection(server))
    run = "train-shelf-agent-2026-01-01-at-09-30-" + "x" * 120
    for step in (1, 2, 11):
        rollout = sample_rollout(0, run=run, step=step)
        sink.groups_finished(GroupsFinished(run, "train", step, ("a",), (rollout,)))
    sessions = {span.attributes["langfuse.session.id"] for span in server.spans.values()}
    assert len({session[:30] for session in sessions}) == 3 and server.faults_found() == []


def test_what_is_masked_does_not_leave_and_a_sample_is_the_same_each_time(server: TraceServer) -> None:
    def mask(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("box", "***"))

    shown(LangfuseSink(connection(server), mask=mask, sample_rate=0.5))
    first = dict(server.spans)
    shown(LangfuseSink(connection(server), mask=mask, sample_rate=0.5))
    assert first.keys() == server.spans.keys()
    rollouts = {each.trace for each in server.spans.values() if each.type == "agent"}
    assert 4 <= len(rollouts) <= 20
    inputs = [each.attributes.get("langfuse.observation.input", "") for each in server.spans.values()]
    assert not [text for text in inputs if "box" in text]
    with pytest.raises(ConfigError, match="sample_rate: a number from 0 to 1"):
        LangfuseSink(connection(server), sample_rate=2)


def test_older_and_newer_servers_are_sent_scores_as_they_take_them() -> None:
    for options in ({}, {"bulk": False}):
        with trace_server(**options) as server:
            shown(LangfuseSink(connection(server)))
            assert sum(score["name"] == "success" for score in server.scores.values()) == 18, options
            posts = [path for method, path in server.requests if method == "POST" and path.endswith("scores")]
            assert len(posts) < 20, "a list is one request"


def test_a_score_that_is_refused_is_named_and_costs_no_other() -> None:
    event = GroupsFinished(RUN, "train", 0, ("a",), tuple(sample_rollout(index) for index in range(4)))
    for options in ({}, {"bulk": False}):
        with trace_server(refused_scores=lambda body: body["name"] == "success", **options) as server:
            with pytest.raises(RejectedError, match=r"3 of 9 scores were refused, such as .*refused"):
                LangfuseSink(connection(server)).groups_finished(event)
            assert sorted({score["name"] for score in server.scores.values()}) == ["reward", "ruler_score"]


def test_one_rollout_that_the_server_refuses_costs_no_other(server: TraceServer) -> None:
    rollouts = tuple(sample_rollout(index) for index in range(8))
    event = GroupsFinished(RUN, "train", 0, ("a",), rollouts)
    LangfuseSink(connection(server)).groups_finished(event)
    bad = next(iter(server.traces()))
    server.spans.clear()
    server.breaks = lambda traces: bad in traces
    with pytest.raises(RejectedError, match=f"the server refused trace {bad}: HTTP 400"):
        LangfuseSink(connection(server)).groups_finished(event)
    assert len(server.traces()) == 7 and bad not in server.traces()
    traced = {score["traceId"] for score in server.scores.values()}
    assert server.traces().keys() <= traced | {trace for trace, spans in server.traces().items() if spans[0].error}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("langfuse", [True, False])
def test_any_answer_with_a_2xx_status_is_an_accepted_export(reply: str, langfuse: bool) -> None:
    rollouts = tuple(sample_rollout(index) for index in range(4))
    with trace_server(langfuse=langfuse, reply=reply) as server:
        sink = LangfuseSink(connection(server)) if langfuse else OtlpSink(server.endpoint)
        sink.check()
        server.requests.clear()
        sink.groups_finished(GroupsFinished(RUN, "train", 0, ("a",), rollouts))
        sink.closed()
        exports = [path for _, path in server.requests if path.endswith("/traces")]
        assert len(exports) == 1 and len(server.traces()) == 4 and bool(server.scores) is langfuse


@pytest.mark.parametrize("reply", ["json", "protobuf"])
def test_spans_that_a_collector_rejects_in_part_are_named_and_not_sent_again(reply: str) -> None:
    event = GroupsFinished(RUN, "train", 0, ("a",), tuple(sample_rollout(index) for index in range(4)))
    with trace_server(langfuse=False, reply=reply, partial=(2, "too old")) as server:
        with pytest.raises(RejectedError, match="the server refused 2 spans of a request: 'too old'"):
            OtlpSink(server.endpoint).groups_finished(event)
        assert len(server.requests) == 1
        server.partial = (0, "use a newer exporter")  # a warning, and everything was accepted
        OtlpSink(server.endpoint).groups_finished(event)


def test_an_answer_to_a_redirect_is_no_answer_to_the_export() -> None:
    event = GroupsFinished(RUN, "train", 0, ("a",), (sample_rollout(0),))
    with trace_server(langfuse=False) as server, pytest.raises(DeliveryError, match=r"HTTP 301: '/elsewhere'"):
        server.faults.append("redirect")
        OtlpSink(server.endpoint).groups_finished(event)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("LANGFUSE_PUBLIC_KEY", "set LANGFUSE_PUBLIC_KEY"),
        ("LANGFUSE_SECRET_KEY", "set LANGFUSE_SECRET_KEY"),
    ],
)
def test_a_missing_variable_is_named(
    server: TraceServer, monkeypatch: pytest.MonkeyPatch, missing: str, message: str
) -> None:
    set_environment(monkeypatch, server)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=message):
        resolve_sinks(["langfuse"])


def test_wrong_keys_are_an_error_at_start_and_a_server_that_is_away_is_not(
    server: TraceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, server)
    [sink] = resolve_sinks(["langfuse"])
    sink.check()
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-other")
    [sink] = resolve_sinks(["langfuse"])
    with pytest.raises(ConfigError, match=r"refused the keys \(401\): check LANGFUSE_PUBLIC_KEY"):
        sink.check()
    monkeypatch.setenv("LANGFUSE_BASE_URL", "http://127.0.0.1:9")
    [sink] = resolve_sinks(["langfuse"])
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        sink.check()
    monkeypatch.setenv("LANGFUSE_BASE_URL", "langfuse.example")
    with pytest.raises(ConfigError, match=r"LANGFUSE_BASE_URL: 'langfuse\.example' is not a URL"):
        resolve_sinks(["langfuse"])


def set_environment(monkeypatch: pytest.MonkeyPatch, server: TraceServer) -> None:
    for name, value in (("BASE_URL", server.url), ("PUBLIC_KEY", PUBLIC), ("SECRET_KEY", SECRET)):
        monkeypatch.setenv(f"LANGFUSE_{name}", value)


def test_otlp_reads_its_variables_and_says_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_ENDPOINT"):
        resolve_sinks(["otlp"])
    with trace_server(langfuse=False) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        [sink] = resolve_sinks(["otlp"])
        sink.check()
        server.faults.append(401)
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS"):
            sink.check()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        with pytest.raises(ConfigError, match="http/protobuf or unset"):
            resolve_sinks(["otlp"])


def test_otlp_spans_speak_the_genai_conventions_and_continue_the_apps_own_trace() -> None:
    rollout = sample_rollout(1)
    outer = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    record = rollout.record.model_copy(update={"metadata": {"traceparent": outer}})
    with trace_server(langfuse=False) as server:
        OtlpSink(server.endpoint).groups_finished(
            GroupsFinished(RUN, "train", 0, ("a",), (rollout.model_copy(update={"record": record}),))
        )
        [spans] = server.traces().values()
    root, _, call, tool, _, _ = spans
    assert (root.trace, root.parent) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert root.attributes["gen_ai.operation.name"] == "invoke_agent" and root.attributes["offbook.reward"] == 0.25
    texts = root.attributes["input.value"], root.attributes["output.value"]  # Phoenix's list of traces shows these
    assert texts == ("Where is box 1?", "On shelf 7.")
    own = call.attributes
    assert (own["gen_ai.operation.name"], own["gen_ai.request.model"], own["gen_ai.usage.output_tokens"]) == (
        "chat",
        "agent",
        12,
    )
    assert (own["gen_ai.response.model"], own["offbook.call.step"]) == ("agent", 0)
    assert own["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert json.loads(own["gen_ai.input.messages"])[0] == {
        "role": "system",
        "parts": [{"type": "text", "content": "Be brief."}],
    }
    [answer] = json.loads(own["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "tool_call", "id": "tool-1", "name": "look_up", "arguments": '{"box": 7}'}]
    assert tool.name == "execute_tool look_up" and tool.attributes["gen_ai.tool.call.result"] == "shelf 7"


def test_parallel_tool_calls_and_nested_nodes_keep_their_order() -> None:
    rollout = sample_rollout(0)
    first, second = rollout.calls
    assert first.origin is not None
    inner = first.origin.model_copy(update={"namespace": "team:1|writer:2"})
    asked = [{"id": name, "function": {"name": name, "arguments": "not json"}} for name in ("b", "a")]
    output = first.outputs[0].model_copy(update={"message": {"role": "assistant", "tool_calls": asked}})
    told = tuple({"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("a", "b"))
    calls = (
        first.model_copy(update={"origin": inner, "outputs": (output,)}),
        second.model_copy(update={"origin": inner, "messages": (*first.messages, *told)}),
    )
    spans = rollout_spans(rollout.model_copy(update={"calls": calls}))
    names = [(span.kind, span.name, span.parent) for span in spans]
    assert names[1:3] == [(SpanKind.NODE, "team", "rollout"), (SpanKind.NODE, "writer", "node/team:1")]
    tools = [span for span in spans if span.kind is SpanKind.TOOL]
    assert [(span.name, span.input, span.output, span.parent) for span in tools] == [
        ("b", "not json", "B", "node/team:1"), ("a", "not json", "A", "node/team:1"),
    ]  # fmt: skip
    starts = [span.start // 1_000_000 for span in spans]
    assert starts == sorted(set(starts)) and spans[0].end >= max(span.end for span in spans)


def test_the_tensorboard_sink_writes_files_that_its_own_messages_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="pip install -r requirements/test.txt")
    from tensorboardX.proto import event_pb2

    from offbook_sinks.tensorboard_sink import TensorboardSink

    texts: dict[tuple[str, int], str] = {}

    def scalars() -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        for file in sorted(tmp_path.rglob("events.out.*")):
            data, at = file.read_bytes(), 0
            while at < len(data):  # TFRecord: length, its CRC, the message, its CRC
                length = int.from_bytes(data[at : at + 8], "little")
                event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])  # type: ignore[attr-defined]
                at += 16 + length
                found |= {(value.tag, event.step): value.simple_value for value in event.summary.value
                          if value.WhichOneof("value") == "simple_value"}  # fmt: skip
                texts.update({(value.tag, event.step): value.tensor.string_val[0].decode()
                              for value in event.summary.value if value.WhichOneof("value") == "tensor"})  # fmt: skip
        return found

    check_sink(lambda: TensorboardSink(tmp_path), lambda: [f"{tag} {step}" for tag, step in scalars()])
    assert scalars()["train/reward", 2] == 1.25 and scalars()["val/success", 0] == 0.25
    assert ("train/not/finite", 1) not in scalars()
    assert texts["alert/kl/text_summary", 2] == "the policy is far from its base"
