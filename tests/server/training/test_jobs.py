"""From records to the learner's job: what is trained, what is left out, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from offbook.base.config import TrainConfig
from offbook.base.types import (
    Call,
    CallOutput,
    CallStatus,
    CallTrace,
    OutputTrace,
    RenderedHistory,
    RolloutException,
    Sampling,
)
from offbook.base.wire import GroupRecord, TrainRequest, TrajectoryRecord
from offbook.server.errors import ApiError
from offbook.server.training.jobs import build_job, job_folder
from offbook_dashboard.token_view import not_trained

TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


def output(index: int = 0, text: str | None = "hi", **fields: Any) -> CallOutput:
    values = {"token_ids": (7, 8), "logprobs": (-0.5, None), "finish_reason": "stop"} | fields
    return CallOutput(index=index, message={"role": "assistant", "content": text} | values.pop("message", {}), **values)


def call(call_id: str = "c", outputs: tuple[CallOutput, ...] = (output(),), **fields: Any) -> Call:
    values = {
        "model": "m",
        "step": 3,
        "status": CallStatus.COMPLETE,
        "sampling": Sampling(),
        "tools": None,
        "messages": (),
    }
    values |= {"started_at": 1.0} | fields
    return Call(
        id=call_id,
        trajectory_id="t",
        prompt_ids=(1, 2, 3),
        outputs=outputs,
        ended_at=50,
        **values,
    )


def built(
    calls: tuple[Call, ...],
    reward: float | None = 1.0,
    exception: RolloutException | None = None,
    config: TrainConfig = TrainConfig(),
    **fields: Any,
):
    request = TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("t",)),), config=config)
    record = TrajectoryRecord(id="t", model="m", reward=reward, exception=exception, started_at=1, ended_at=2, **fields)
    return build_job(request, {"t": record}, {"t": calls}).groups[0][0]


def test_a_sample_holds_the_recorded_tokens_and_nan_where_there_is_no_logprob() -> None:
    (sample,) = built((call(constrained="grammar"),)).samples
    assert sample.prompt_ids.tolist() == [1, 2, 3] and sample.completion_ids.tolist() == [7, 8]
    assert sample.logprobs[0] == -0.5 and math.isnan(sample.logprobs[1])
    assert (sample.step, sample.constrained, sample.call_id, sample.index) == (3, "grammar", "c", 0)


def test_supervised_training_takes_unscored_rollouts_and_calls_to_other_models() -> None:
    config = TrainConfig(loss="cross_entropy")
    request = TrainRequest(
        id="r", model="m", groups=(GroupRecord(trajectory_ids=("t",)),), config=config, evaluate=True
    )
    record = TrajectoryRecord(id="t", model="m", started_at=1, ended_at=2)
    job = build_job(request, {"t": record}, {"t": (call(model="teacher"), call("own"))})
    assert [sample.call_id for sample in job.groups[0][0].samples] == ["c", "own"] and job.evaluate
    with pytest.raises(ApiError, match="Trajectories with nothing to train on: 't': no call was recorded"):
        build_job(request, {"t": record}, {"t": ()})


def test_the_answers_of_a_paid_model_in_a_thread_are_imitated_and_not_rewarded() -> None:
    answered = OutputTrace(
        index=0, message={"role": "assistant", "content": "A7"}, finish_reason="stop", status=CallStatus.COMPLETE,
        tokens=1, logprob_mean=None, logprob_min=None,
    )  # fmt: skip
    asked = ({"role": "user", "content": "Where is it?"},)
    paid = CallTrace(
        id="p", trajectory_id="t", model="openai/gpt-4.1", step=0, status=CallStatus.COMPLETE, sampling=Sampling(),
        messages=asked, tools=(TOOL,), started_at=1, ended_at=2, prompt_tokens=3,
        outputs=(answered, answered.model_copy(update={"index": 1, "status": CallStatus.FAILED})),
    )  # fmt: skip
    record = TrajectoryRecord(id="t", model="paid", reward=1.0, outside_calls=(paid,), started_at=1, ended_at=2)
    group = (GroupRecord(trajectory_ids=("t",)),)
    imitating = TrainRequest(id="r", model="m", groups=group, config=TrainConfig(loss="cross_entropy"))
    [history] = build_job(imitating, {"t": record}, {"t": ()}).groups[0][0].histories
    assert history == RenderedHistory(messages=(*asked, answered.message), tools=(TOOL,), targets=(1,))
    with pytest.raises(ApiError, match="nothing to train on"):
        build_job(TrainRequest(id="r", model="m", groups=group), {"t": record}, {"t": ()})


def test_only_a_supervised_request_can_be_evaluated() -> None:
    with pytest.raises(ValueError, match="evaluate=true needs loss='cross_entropy'"):
        TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("t",)),), evaluate=True)


def test_truncated_answers_are_trained_and_all_other_ends_are_left_out() -> None:
    kept = built(
        (
            call("whole"),
            call("cut", status=CallStatus.TRUNCATED, outputs=(output(status=CallStatus.TRUNCATED),)),
            call("gone", status=CallStatus.CANCELLED),
            call("broken", status=CallStatus.FAILED),
            call("late", late=True),
            call("other", model="another"),
            call("empty", outputs=(output(token_ids=(), logprobs=()),)),
            call("half", outputs=(output(0), output(1, status=CallStatus.CANCELLED))),
        )
    )
    assert [(sample.call_id, sample.index) for sample in kept.samples] == [("whole", 0), ("cut", 0), ("half", 0)]
    assert kept.left_out == 4  # gone, broken, late, empty


def test_a_sample_says_of_calls_and_parse_failures_what_was_recorded_with_its_output() -> None:
    parsed = output(0, None, message={"tool_calls": [{"id": "1"}]})
    failed = output(1, "<tool_call>{", parse_failure=True)
    samples = built((call(outputs=(parsed, failed, output(2)), tools=(TOOL,)),)).samples
    assert [sample.tool_call for sample in samples] == [True, False, False]
    assert [sample.parse_failure for sample in samples] == [False, True, False]


def test_an_unscored_trajectory_may_be_empty_and_a_scored_one_may_not() -> None:
    assert built((), reward=None).samples == ()
    assert built(
        (), exception=RolloutException(type="ValueError", message="no", traceback="")
    ).failed  # whatever a judge gave it
    pair = TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("t", "bare")),))
    records = {
        name: TrajectoryRecord(id=name, model="m", reward=1.0, started_at=1, ended_at=2) for name in ("t", "bare")
    }
    job = build_job(pair, records, {"t": (call(),)})
    assert [len(each.samples) for each in job.groups[0]] == [1, 0]  # the learner counts the empty one
    with pytest.raises(ApiError, match=r"'t'.*no call was recorded"):
        built(())
    with pytest.raises(ApiError, match="cancelled, failed, or arrived after the end"):
        built((call(late=True),))


def test_a_call_with_an_image_is_never_trained() -> None:
    """Two images have equal token ids, so a tree would merge their calls."""
    text = {"type": "text", "text": "What is this?"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    plain, shown = ({"role": "user", "content": content} for content in ([text], [text, image]))
    kept = built((call("plain", messages=(plain,)), call("shown", messages=(shown,))))
    assert ([sample.call_id for sample in kept.samples], kept.left_out) == (["plain"], 1)
    with pytest.raises(ApiError, match=r"'t': their calls have images, sounds or files .* text alone") as caught:
        built((call("shown", messages=(shown,)),))
    assert caught.value.code == "no_calls"
    assert "images" in not_trained(call(messages=(shown,)), output(), None)


def test_the_weights_and_marks_of_a_record_are_those_of_its_samples() -> None:
    calls = (
        call("half"),
        call("plain"),
        call("out", outputs=(output(0), output(1))),
        call("gone", status=CallStatus.CANCELLED),
        call("side", model="another"),
    )
    weights = {"half": 0.5, "out": 0.0, "gone": 0.0, "side": 3.0}
    kept = built(calls, weights=weights, unused=("plain", "gone", "side"))
    assert [(s.call_id, s.index, s.weight, s.unused) for s in kept.samples] == [
        ("half", 0, 0.5, False),
        ("plain", 0, 1.0, True),
        ("out", 0, 0.0, False),
        ("out", 1, 0.0, False),
    ]
    assert kept.left_out == 1  # gone


def test_what_the_app_threw_away_is_not_imitated_unless_its_weight_says_so() -> None:
    calls = (call("kept"), call("retried"), call("wanted"))
    good = TrainConfig(loss="cross_entropy", min_reward=1.0)
    kept = built(calls, weights={"wanted": 1.0}, unused=("retried", "wanted"), config=good)
    assert [(s.call_id, s.weight) for s in kept.samples] == [("kept", 1.0), ("retried", 0.0), ("wanted", 1.0)]


def test_a_model_that_nobody_called_is_not_trained_on_earlier_rollouts_alone() -> None:
    good = TrainConfig(loss="cross_entropy", min_reward=1.0)
    groups = (GroupRecord(trajectory_ids=("t",)),)
    request = TrainRequest(id="r", model="m", groups=groups, config=good, replayed=("early",))
    records = {
        name: TrajectoryRecord(id=name, model="m", reward=1.0, started_at=1, ended_at=2) for name in ("t", "early")
    }
    with pytest.raises(ApiError, match="'t': their calls went to planner") as caught:
        build_job(request, records, {"t": (call(model="planner"),), "early": (call(),)})
    assert caught.value.code == "no_calls"
    assert len(build_job(request, records, {"t": (call(),), "early": (call(),)}).groups) == 2


def test_call_rewards_stand_in_the_order_of_their_calls_also_of_those_that_are_not_trained() -> None:
    calls = (
        call("last", started_at=40.0),
        call("first", started_at=10.0),
        call("side", model="another", started_at=20.0),
        call("gone", status=CallStatus.CANCELLED, started_at=30.0),
    )
    kept = built(calls, call_rewards={"gone": 0.25, "first": 1.0, "side": 0.5})
    assert kept.call_rewards == (1.0, 0.5, 0.25)
    assert {s.call_id: s.earned_before for s in kept.samples} == {"first": 0, "last": 3}


def test_weights_that_leave_every_call_out_are_an_error_that_names_train_on() -> None:
    calls = (call("a"), call("b", outputs=(output(0), output(1))), call("gone", status=CallStatus.CANCELLED))
    out = {"a": 0.0, "b": 0.0}
    with pytest.raises(ApiError, match="'t': train_on= excluded every call: all 2 calls") as caught:
        built(calls, weights=out)
    assert (caught.value.status, caught.value.code) == (400, "no_calls")
    history = RenderedHistory(messages=({"role": "assistant", "content": "hi"},), targets=(0,))
    assert built(calls, weights=out, histories=(history,)).histories == (history,)
    assert built(calls, weights=out, reward=None).reward is None
    pair = TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("t", "u")),))
    records = {
        name: TrajectoryRecord(id=name, model="m", reward=1.0, started_at=1, ended_at=2, weights=weights)
        for name, weights in (("t", out), ("u", {}))
    }
    job = build_job(pair, records, {"t": calls, "u": (call("c"),)})
    assert [sample.weight for each in job.groups[0] for sample in each.samples] == [0.0, 0.0, 0.0, 1.0]


def test_a_request_id_never_leads_out_of_the_jobs_folder(tmp_path: Path) -> None:
    assert job_folder(tmp_path, "train-1.a_b") == tmp_path / "train-1.a_b"
    for request_id in ("..", ".", "../../x", "/etc", "a/b", "a\x00b", ".hidden", "a\n"):
        folder = job_folder(tmp_path, request_id)
        assert folder.parent == tmp_path and folder.name.startswith("id-")
