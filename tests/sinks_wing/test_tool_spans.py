"""The spans of tools: with the times that an adapter recorded, or as a gap that says so."""

from __future__ import annotations

from collections.abc import Sequence

from offbook.base.types import ToolRun
from offbook.base.wire import RolloutTrace
from offbook.testing.sinks import START, sample_rollout
from offbook_sinks.spans import (
    GAP,
    NO_RESULT,
    RECORDED,
    SpanKind,
    TraceSpan,
    rollout_spans,
)

ASKED, ANSWERED = START + 0.3, START + 0.6
"""When the sample rollout's first call ended and its second began."""


def ran(began: float, seconds: float, **known: str) -> ToolRun:
    return ToolRun(tool_call_id="tool-0", name="look_up", started_at=began, ended_at=began + seconds, **known)


def with_runs(runs: Sequence[ToolRun], index: int = 0) -> RolloutTrace:
    rollout = sample_rollout(index)
    return rollout.model_copy(update={"record": rollout.record.model_copy(update={"tool_runs": tuple(runs)})})


def spans(rollout: RolloutTrace) -> list[TraceSpan]:
    return [span for span in rollout_spans(rollout) if span.kind is SpanKind.TOOL]


def timing(span: TraceSpan) -> str:
    return str((span.facts or {})["timing"])


def seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9 - START, 3)


def test_a_recorded_run_is_the_spans_time_and_a_gap_says_that_it_is_one() -> None:
    [span] = spans(with_runs([ran(START + 0.4, 0.1)]))
    assert (seconds(span.start), seconds(span.end), timing(span)) == (0.4, 0.5, RECORDED)
    assert (span.input, span.output, span.error) == ({"box": 7}, "shelf 7", None)
    [gap] = spans(with_runs([]))
    assert (seconds(gap.start), seconds(gap.end), timing(gap)) == (0.3, 0.6, GAP)
    assert gap.key == span.key


def test_a_run_that_another_clock_timed_is_moved_between_its_calls_and_says_so() -> None:
    [late] = spans(with_runs([ran(START - 5, 0.1)]))
    assert (seconds(late.start), seconds(late.end)) == (0.3, 0.4)
    assert (
        timing(late) == "recorded: how long the tool ran; moved by 5.300 s, as the clocks of client and server differ"
    )
    [early] = spans(with_runs([ran(START + 5, 0.1)]))
    assert (seconds(early.start), seconds(early.end)) == (0.5, 0.6)
    assert "moved by -4.500 s" in timing(early)


def test_the_error_and_the_result_that_no_call_saw_are_the_spans_own() -> None:
    failed = sample_rollout(3)
    run = ToolRun(
        tool_call_id="tool-3", name="look_up", started_at=START + 4, ended_at=START + 9, error="TimeoutError()"
    )
    [span] = spans(failed.model_copy(update={"record": failed.record.model_copy(update={"tool_runs": (run,)})}))
    assert (span.error, span.output, timing(span)) == ("TimeoutError()", None, RECORDED)
    assert seconds(span.end) - seconds(span.start) == 5.0
    assert timing(spans(failed)[0]) == NO_RESULT
    [kept] = spans(with_runs([ran(START + 4, 0.1, result="shelf 8")]))
    assert kept.output == "shelf 7", "what a model call was sent goes before what the adapter kept"


def test_each_of_several_runs_is_a_span_and_their_starts_differ() -> None:
    first, second = spans(with_runs([ran(START + 0.35, 0.05, error="ConnectionError()"), ran(START + 0.45, 0.1)]))
    assert (first.error, second.error) == ("ConnectionError()", None)
    assert first.key != second.key and first.end <= second.start


def test_an_id_that_a_model_used_again_is_matched_by_turn_or_left_a_gap() -> None:
    rollout = sample_rollout(0)
    again = rollout.calls[0].model_copy(update={"id": "again", "started_at": START + 0.6, "ended_at": START + 0.7})
    calls = (rollout.calls[0], again)

    def timings(*runs: ToolRun) -> list[str]:
        record = rollout.record.model_copy(update={"tool_runs": runs})
        return [timing(span) for span in spans(RolloutTrace(record=record, calls=calls))]

    assert timings(ran(START + 0.4, 0.1), ran(START + 0.8, 0.1)) == [RECORDED, RECORDED]
    assert timings(ran(START + 0.4, 0.1)) == [NO_RESULT, NO_RESULT]
