"""A takeover's decisions in Langfuse, W&B and JSON Lines: each once, with its numbers and its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbook.base.takeovers import TakeoverState
from offbook.contracts import TakeoverDecided, TraceSink
from offbook.tracing.export import ExportError
from offbook.tracing.jsonl import JsonlSink
from offbook.tracing.takeover_events import TakeoverEvents, takeover_events
from offbook_langfuse import LangfuseConnection, LangfuseSink
from tests.fakes.trace_server import PUBLIC, SECRET, trace_server
from tests.server.pages.recorded_takeover import RUN

STATE = TakeoverState.model_validate({"route": "order-desk", "decisions": RUN["decisions"]})


def test_each_decision_is_an_event_with_its_numbers_and_a_fixed_id() -> None:
    events = takeover_events(STATE)
    assert len(events) == len(STATE.decisions) == len({event.id for event in events})
    for event, decision in zip(events, STATE.decisions, strict=True):
        assert (event.run, event.verdict, event.reason) == ("route/order-desk", decision.verdict, decision.reason)
        assert event.metrics["share"] == decision.share and event.metrics.get("lower") == decision.numbers.lower
    assert takeover_events(STATE) == events


def test_in_langfuse_a_decision_is_a_trace_of_the_routes_session_with_scores() -> None:
    with trace_server() as server:
        for _ in range(2):  # the second time, as after a restart, changes nothing
            events = TakeoverEvents([LangfuseSink(LangfuseConnection(server.url, PUBLIC, SECRET))])
            events.check()
            assert events.show(STATE) == len(STATE.decisions) and events.show(STATE) == 0
            events.close()
            assert len(server.spans) == len(STATE.decisions)
        shown = [
            each
            for span in server.spans.values()
            if (each := span.attributes)["langfuse.trace.name"] == "takeover left"
        ]
        left = [decision for decision in STATE.decisions if decision.verdict == "left"]
        assert len(shown) == len(left) > 0
        for span in shown:
            assert span["langfuse.session.id"] == "takeover/route/order-desk"
            assert span["langfuse.observation.level"] == "WARNING"
        reasons = {json.loads(span["langfuse.observation.output"])["reason"] for span in shown}
        assert reasons == {decision.reason for decision in left}
        shares = [score for score in server.scores.values() if score["name"] == "takeover/share"]
        assert sorted(score["value"] for score in shares) == sorted(decision.share for decision in STATE.decisions)


def test_json_lines_have_each_decision_once(tmp_path: Path) -> None:
    for _ in range(2):
        events = TakeoverEvents([JsonlSink(tmp_path)])
        events.show(STATE)
        events.close()
    lines = [json.loads(line) for line in (tmp_path / "takeovers.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == [decision.verdict for decision in STATE.decisions]


class Broken(TraceSink):
    """A sink that takes two decisions, and then one each time."""

    name = "broken"

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.left = 2

    def takeover_decided(self, event: TakeoverDecided) -> None:
        if not self.left:
            self.left = 1
            raise OSError("away")
        self.left -= 1
        self.taken.append(event.number)


def test_what_a_sink_did_not_take_is_named_and_shown_again_in_order(tmp_path: Path) -> None:
    broken = Broken()
    events = TakeoverEvents([broken, JsonlSink(tmp_path)])
    for most in range(2, len(STATE.decisions)):
        with pytest.raises(ExportError, match=r"broken: route/order-desk/takeover/.*away"):
            events.show(STATE)
        assert broken.taken == list(range(most))
    assert events.show(STATE) == 1
    assert len((tmp_path / "takeovers.jsonl").read_text().splitlines()) == len(STATE.decisions)
