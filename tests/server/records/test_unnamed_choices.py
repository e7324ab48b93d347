"""Choices that do not name their call are found by messages and answer, or refused where that could be several."""

from __future__ import annotations

import pytest

from offbook.base.types import (
    Call,
    CallOutput,
    CallRef,
    CallStatus,
    Message,
    RenderedHistory,
    Sampling,
    new_id,
)
from offbook.base.wire import OPEN, TrajectoryRecord
from offbook.server.errors import ApiError
from offbook.server.records.store import Store

ASK: Message = {"role": "user", "content": "Which way?"}
AGAIN: Message = {"role": "user", "content": "And now?"}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def a_call(
    answer: Message,
    *asked: Message,
    tokens: tuple[int, ...] = (7,),
    at: float = 100.0,
    under: str | None = None,
    model: str = "agent",
    temperature: float = 1.0,
) -> Call:
    return Call(
        id=new_id("call"),
        trajectory_id=under or new_id(OPEN),
        model=model,
        step=3,
        status=CallStatus.COMPLETE,
        sampling=Sampling(temperature=temperature),
        messages=asked or (ASK,),
        tools=None,
        prompt_ids=(1, 2),
        outputs=(CallOutput(index=0, token_ids=tokens, logprobs=(-0.5,), message=answer, finish_reason="stop"),),
        started_at=at,
        ended_at=at + 1,
    )


def a_record(
    *messages: Message, targets: tuple[int, ...], id: str = "traj-a", calls: tuple[CallRef, ...] = (), at: float = 100.0
) -> TrajectoryRecord:
    history = RenderedHistory(messages=messages, targets=targets)
    return TrajectoryRecord(
        id=id, model="agent", calls=calls, histories=(history,), reward=1.0, started_at=at, ended_at=at + 2
    )


async def kept(store: Store, id: str = "traj-a") -> tuple[set[str], tuple[RenderedHistory, ...]]:
    record = (await store.finished([id]))[id]
    assert record.calls is not None
    return {ref.call_id for ref in record.calls}, record.histories


async def test_a_conversation_without_marks_is_named_call_by_call(store: Store) -> None:
    first = await store.add_call(a_call(said("left")))
    then = await store.add_call(a_call(said("right"), ASK, said("left"), AGAIN, at=101.0))
    await store.add_call(a_call(said("right"), AGAIN))
    record = a_record(ASK, said("left"), AGAIN, said("right"), targets=(1, 3))
    assert await store.finish([record]) == {"traj-a": 2}
    assert await kept(store) == ({first.id, then.id}, ())
    assert (await store.calls_of(["traj-a"]))["traj-a"] == (first, then)


async def test_tool_calls_are_compared_by_name_and_arguments(store: Store) -> None:
    def tool_call(id: str, arguments: str) -> Message:
        function = {"name": "move", "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }

    call = await store.add_call(a_call(tool_call("call_1", '{"to": "A1", "by": 2}')))
    await store.add_call(a_call(tool_call("call_2", '{"to": "B2", "by": 2}')))
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "Which way?"}]}
    answer = tool_call("other", '{"by":2,"to":"A1"}') | {"content": ""}
    await store.finish([a_record(parts, answer, targets=(1,))])
    assert await kept(store) == ({call.id}, ())


async def test_equal_samples_are_shared_out_one_for_each_rollout(store: Store) -> None:
    two = {(await store.add_call(a_call(said("left")))).id for _ in range(2)}
    rollouts = [a_record(ASK, said("left"), targets=(1,), id=f"traj-{name}") for name in "abc"]
    assert await store.finish(rollouts) == {"traj-a": 1, "traj-b": 1, "traj-c": 0}
    kept_by = [await kept(store, record.id) for record in rollouts]
    assert kept_by[0][0] | kept_by[1][0] == two and kept_by[0][0] != kept_by[1][0]
    assert kept_by[2][1] == rollouts[2].histories  # no call is left: rendered
    assert await store.finish(rollouts[:2]) == {"traj-a": 1, "traj-b": 1}  # logged first, then trained
    assert [(await kept(store, record.id))[0] for record in rollouts[:2]] == [kept_by[0][0], kept_by[1][0]]


async def test_a_call_from_the_time_of_the_rollout_goes_before_an_older_one(store: Store) -> None:
    await store.add_call(a_call(said("left"), tokens=(8, 9), at=10.0))
    now = await store.add_call(a_call(said("left"), at=101.0))
    await store.finish([a_record(ASK, said("left"), targets=(1,))])
    assert await kept(store) == ({now.id}, ())


@pytest.mark.parametrize("other", [{"tokens": (8, 9)}, {"temperature": 0.0}])
async def test_two_calls_that_differ_in_tokens_or_settings_are_refused_with_the_way_out(
    store: Store, other: dict[str, object]
) -> None:
    calls = [await store.add_call(a_call(said("left"))), await store.add_call(a_call(said("left"), **other))]  # type: ignore[arg-type]
    with pytest.raises(ApiError, match=r"append `completion.choices\[0\]` itself") as caught:
        await store.finish([a_record(ASK, said("left"), targets=(1,))])
    assert caught.value.status == 409 and all(call.id in str(caught.value) for call in calls)
    assert await store.finished(["traj-a"]) == {}


async def test_what_belongs_to_others_is_left_alone_and_rendered(store: Store) -> None:
    await store.add_call(a_call(said("left"), under="traj-captured"))
    await store.add_call(a_call(said("left"), model="another"))
    claimed = await store.add_call(a_call(said("left")))
    named = CallRef(call_id=claimed.id)
    beside = a_record(ASK, said("left"), targets=(), id="traj-b", calls=(named,))
    record = a_record(ASK, said("left"), targets=(1,))
    assert await store.finish([record, beside]) == {"traj-a": 0, "traj-b": 1}
    assert await kept(store) == (set(), record.histories)


async def test_a_further_history_may_repeat_a_choice(store: Store) -> None:
    call = await store.add_call(a_call(said("left")))
    record = a_record(ASK, said("left"), targets=(1,))
    record = record.model_copy(update={"histories": record.histories * 2})
    await store.finish([record])
    assert await kept(store) == ({call.id}, ())
