"""A conformance suite for trace sinks, without a test framework: `check_sink(make, read)` runs every check and raises
AssertionError with all that fail.

    from offbook.testing.sinks import check_sink

    def test_my_sink(tmp_path):
        check_sink(lambda: MySink(tmp_path), lambda: ids_shown(tmp_path))
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from offbook.base.types import (
    CallOrigin,
    CallStatus,
    CallTrace,
    Message,
    OutputTrace,
    RolloutException,
    RolloutPlace,
    Sampling,
)
from offbook.base.wire import RolloutTrace, TrajectoryRecord
from offbook.contracts import (
    Alert,
    CheckpointSaved,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceEvent,
    TraceSink,
)
from offbook.tracing.fanout import show, sink_name
from offbook.tracing.sink_registry import METHODS

START = 1_767_225_600.0
"""Unix seconds at which the sample run begins."""
RUN = "run-conformance"


def sample_rollout(index: int, *, run: str = RUN, step: int = 0, split: str = "train") -> RolloutTrace:
    """A rollout with two model calls, a tool call between them, and a judge's explanation.

        sample_rollout(0).record.reward  # 0.0

    `index`: its number in the step; groups have four rollouts, and the last of each group failed. `run`, `step`, `split`:
    where it belongs. The same arguments give the same rollout, with the same ids and times."""
    began, name = START + 10 * step + index, f"traj-{run}-{split}-{step}-{index}"
    failed = index % 4 == 3
    tool_call = {"id": f"tool-{index}", "type": "function", "function": {"name": "look_up", "arguments": '{"box": 7}'}}
    opening: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Where is box {index}?"},
    )
    later: tuple[Message, ...] = (
        {"role": "assistant", "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": tool_call["id"], "content": "shelf 7"},
    )
    calls = (
        _call(f"{name}-0", name, step, opening, {"content": None, "tool_calls": [tool_call]}, began, "tool_calls"),
        _call(f"{name}-1", name, step, (*opening, *later), {"content": "On shelf 7."}, began + 0.5, "stop"),
    )
    record = TrajectoryRecord(
        id=name,
        model="agent",
        reward=None if failed else index / 4,
        metrics={} if failed else {"success": float(index % 2), "ruler_score": index / 4},
        metadata={"app": "shelves"},
        logs=() if failed else (f"RULER explanation: answer {index} is short",),
        exception=RolloutException(type="TimeoutError", message="the tool is away", traceback="") if failed else None,
        started_at=began,
        ended_at=began + 1,
        place=RolloutPlace(run=run, split=split, step=step, scenario=f"box-{index // 4}",
                           group=f"{run}-{split}-{step}-{index // 4}", index=index % 4),
    )  # fmt: skip
    return RolloutTrace(record=record, calls=calls[:1] if failed else calls)


def sample_events(run: str = RUN, checkpoint: str = "") -> list[TraceEvent]:
    """A small run: an evaluation, two steps of two groups, an alert, and another evaluation.

        for event in sample_events():
            if isinstance(event, StepFinished):
                sink.step_finished(event)

    `run`: the run's id. `checkpoint`: a folder; each step then saves a checkpoint there. The same arguments give the same
    events."""
    events: list[TraceEvent] = [RunStarted(run, "agent", 0, START, {"group_size": 4})]
    events += _evaluation(run, 0)
    for step in (0, 1):
        rollouts = tuple(sample_rollout(index, run=run, step=step) for index in range(8))
        groups = tuple(dict.fromkeys(str(rollout.record.place.group) for rollout in rollouts))
        events.append(GroupsFinished(run, "train", step, groups, rollouts))
        metrics = {"reward": 0.25 + step, "entropy": 1.5, "not/finite": float("nan")}
        events.append(StepFinished(run, "agent", step + 1, step, START + 10 * step + 9, metrics))
        if checkpoint:
            events.append(CheckpointSaved(run, "agent", step + 1, checkpoint, {"reward/mean": 0.25}))
    events.append(Alert(run, "agent", 2, START + 20, "kl", "the policy is far from its base", 12.0, 10.0))
    return [*events, *_evaluation(run, 2)]


def check_sink(make: Callable[[], TraceSink], read: Callable[[], Collection[str]], checkpoint: str = "") -> None:
    """Show a sample run to a sink, then again, as after a restart, and check that the tool has everything once.

        def test_my_sink_conforms(tmp_path):
            check_sink(lambda: MySink(tmp_path), lambda: ids_in(tmp_path))

    `make`: makes a sink; it is called twice. `read`: what the tool shows now, one text for each item; an item that the tool
    has twice is listed twice. `checkpoint`: a folder, for sinks that show checkpoints.

    Raises AssertionError with every fault: a missing method, an empty name, nothing shown, an item shown twice, or events
    that change the result when they come again. What the sink raises passes through."""
    faults: list[str] = []
    sink = make()
    missing = [method for method in METHODS if not callable(getattr(sink, method, None))]
    assert not missing, f"{sink_name(sink)} has no {', '.join(missing)}"
    if not sink_name(sink).strip():
        faults.append("name is empty")
    sink.check()
    events = sample_events(checkpoint=checkpoint)
    for event in events:
        show(sink, event)
    sink.closed()
    once = sorted(read())
    faults += [] if once else ["nothing is shown after a whole run"]
    faults += [f"shown twice: {name}" for name in sorted({name for name in once if once.count(name) > 1})]
    for event in events:
        show(sink, event)
    sink.closed()
    if sorted(read()) != once:
        faults.append("the same events shown again changed what is there")
    again = make()
    for event in events:
        show(again, event)
    again.closed()
    again.closed()
    if sorted(read()) != once:
        faults.append("another sink, as after a restart, that is shown the same events changed what is there")
    show(again, GroupsFinished(RUN, "train", 5, ()))
    show(again, StepFinished(RUN, "agent", 6, 5, START + 60, {}))
    again.closed()
    assert not faults, "; ".join(faults)


def _evaluation(run: str, step: int) -> list[TraceEvent]:
    rollouts = tuple(sample_rollout(index, run=run, step=step, split="val") for index in range(4))
    groups = tuple(dict.fromkeys(str(rollout.record.place.group) for rollout in rollouts))
    finished = EvaluationFinished(
        run, "agent", "val", step, START + 10 * step, {"reward": 0.5, "success": 0.25}, groups, rollouts
    )
    return [GroupsFinished(run, "val", step, groups, rollouts), finished]


def _call(
    call_id: str, trajectory: str, step: int, messages: tuple[Message, ...], answer: Message,
    began: float, finish: str,
) -> CallTrace:  # fmt: skip
    output = OutputTrace(index=0, message={"role": "assistant", **answer}, finish_reason=finish, status=CallStatus.COMPLETE,
                         parse_failure=False, tokens=12, logprob_mean=-0.25, logprob_min=-1.5)  # fmt: skip
    return CallTrace(
        id=call_id, trajectory_id=trajectory, model="agent", step=step, status=CallStatus.COMPLETE,
        sampling=Sampling(temperature=0.7), constrained=None, messages=messages,
        tools=({"type": "function", "function": {"name": "look_up", "parameters": {}}},), prompt_tokens=40, outputs=(output,),
        origin=CallOrigin(node="agent", step=1, namespace=f"agent:{call_id}"), error=None, late=False,
        started_at=began + 0.1, ended_at=began + 0.3,
    )  # fmt: skip
