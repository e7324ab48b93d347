"""`model.train_sft` on a real server: what is trained, what a repeated call finds, and what a kill leaves."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.base.types import RolloutException
from offbook.base.wire import TrainEvent
from offbook.client.supervised_training import SFTResult, rate_at, read_examples, split

ANSWER = "seven blue boats"
DATA: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"where is order {number}?"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": f"the end of {number}"},
        ]
    }
    for number in range(8)
]
FAST = offbook.SFTConfig(learning_rate=5e-3, batch_size=4, epochs=2, schedule="constant", warmup=0)


def model_of(backend: offbook.LocalBackend | offbook.RemoteBackend, name: str) -> offbook.TrainableModel:
    return offbook.TrainableModel(name=name, project="tests", base_model="tiny", backend=backend)


async def request_ids(model: offbook.TrainableModel) -> list[str]:
    return [str(state.request_id) for state in await model.checkpoints()]


async def test_conversations_are_imitated_once_however_often_the_call_is_made(
    local_backend: offbook.LocalBackend, tmp_path: Path
) -> None:
    model = model_of(local_backend, "imitates")
    result = await model.train_sft(DATA, FAST)
    assert (result.step, len(result.updates), result.stopped, result.resumed) == (4, 4, "trained", 0)
    assert [update.epoch for update in result.updates] == [0, 0, 1, 1]
    assert result.updates[-1].loss < result.updates[0].loss - 0.3 and result.loss == result.updates[-1].loss
    assert result.warnings == () and result.best_step == 4
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    again = await model.train_sft(str(file), FAST)
    assert again.resumed == 4 and again.updates == result.updates and await model.get_step() == 4
    other = await model.train_sft(DATA, FAST, request_id="by-hand")
    assert other.resumed == 0 and other.step == 8
    assert (await request_ids(model))[-1] == "by-hand-1-3"


async def test_recorded_calls_are_trained_on_their_own_ids_and_failed_rollouts_are_left_out(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "rejects")
    trajectories: list[offbook.Trajectory] = []
    for number in range(3):
        messages: list[Any] = [{"role": "user", "content": f"say hello {number}"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.name, messages=messages, max_tokens=6, temperature=0
        )
        trajectories.append(offbook.Trajectory(messages_and_choices=[*messages, completion.choices[0]]))
    trajectories[2].exception = RolloutException(type="ValueError", message="bad", traceback="")
    events: list[TrainEvent] = []
    result = await model.train_sft(offbook.TrajectoryGroup(trajectories), on_event=events.append)
    assert (result.step, result.examples, result.skipped) == (1, 2, 1)
    [checkpoint] = await model.checkpoints()
    assert checkpoint.metrics["calls/rendered_share"] == 0 and checkpoint.metrics["calls/trained"] == 2
    assert {event.phase for event in events} >= {"plan", "update", "save"}


async def test_held_out_examples_are_measured_logged_and_end_a_training_that_no_longer_helps(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "measured")
    bad = offbook.SFTConfig(learning_rate=1e-12, batch_size=2, epochs=4, held_out=0.25, evaluate_every=1, patience=2)
    result = await model.train_sft(DATA, bad)
    assert result.stopped == "no_improvement" and len(result.updates) < 12
    assert len(result.held_out) == len(result.updates) + 1 and result.held_out[0].step == 0
    assert result.best_step < result.step == len(result.updates)
    logged = [entry for entry in await (await model.api()).logs(model.name) if entry.split == "held-out"]
    assert [entry.metrics["held-out/cross_entropy"] for entry in logged] == [one.loss for one in result.held_out]
    assert (await model.train_sft(DATA, bad)).held_out == result.held_out


KILLED = """
import asyncio, os, signal, sys
import offbook
from tests.client.test_supervised_training import DATA, FAST, model_of

seen = []
def die(event):
    seen.append(event.phase)
    if seen.count("plan") and event.phase == "save" and event.done == 0:
        seen.append("saved")
    if seen.count("saved") == 2:
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(model_of(offbook.RemoteBackend(sys.argv[1]), "killed").train_sft(DATA, FAST, on_event=die))
"""


def check_resumed(result: SFTResult, ids: list[str]) -> None:
    assert result.step == len(result.updates) == 4 and 1 <= result.resumed <= 2
    assert ids == [f"{result.request_id}-{epoch}-{number}" for number, epoch in enumerate([0, 0, 1, 1])]
    assert all(math.isfinite(update.loss) for update in result.updates)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_a_killed_client_goes_on_in_mid_epoch_and_applies_nothing_twice(
    local_backend: offbook.LocalBackend,
) -> None:
    api = await local_backend.connect("tiny")
    environment = {**os.environ, **({"OFFBOOK_API_KEY": api.key} if api.key else {})}
    ended = subprocess.run([sys.executable, "-c", KILLED, api.url], env=environment, check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    model = model_of(local_backend, "killed")
    check_resumed(await model.train_sft(DATA, FAST), await request_ids(model))


def test_the_rate_warms_up_and_falls_and_a_list_gives_each() -> None:
    cosine = offbook.SFTConfig(learning_rate=1.0, warmup=0.2)
    assert [round(rate_at(cosine, update, 5), 3) for update in range(5)] == [1.0, 1.0, 0.854, 0.5, 0.146]
    listed = offbook.SFTConfig(learning_rate=(0.1, 0.2))
    assert [rate_at(listed, update, 3) for update in range(3)] == [0.1, 0.2, 0.2]
    with pytest.raises(ConfigError, match="learning_rate: rates above 0"):
        offbook.SFTConfig(learning_rate=(0.1, 0.0))
    with pytest.raises(ConfigError, match="patience counts measurements of held-out examples"):
        offbook.SFTConfig(patience=1)


def test_equal_examples_are_held_out_together() -> None:
    examples = read_examples([*DATA, *DATA], "agent").examples
    trained, held = split(examples, 0.25, 3)
    assert (len(trained), len(held)) == (12, 4)
    assert not {example.digest for example in trained} & {example.digest for example in held}


def test_a_rollout_of_plain_messages_is_trained_on_all_its_answers_and_one_with_choices_on_these() -> None:
    plain = offbook.Trajectory(messages_and_choices=DATA[0]["messages"])
    [example] = read_examples(plain, "agent").examples
    assert example.record.histories[0].targets == (1, 3) and not example.recorded
    empty = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match=r"number 1\) has no call and no message of the assistant"):
        read_examples([plain, empty], "agent")
    assert read_examples([plain, empty], "agent", skip_bad=True).skipped == 1


def test_weights_of_messages_are_those_of_targets_and_0_is_no_target() -> None:
    messages = [dict(message) for message in DATA[0]["messages"]]
    messages[1]["weight"] = 0
    [example] = read_examples([{"messages": messages}], "agent").examples
    [history] = example.record.histories
    assert (history.targets, history.weights, history.source) == ((3,), (), "row 0")


def test_texts_of_rollouts_are_filtered_by_default_those_with_a_secret_and_counted() -> None:
    key = "sk-live-0123456789abcdef"
    messages: list[Any] = [{"role": "user", "content": f"use {key}"}, {"role": "assistant", "content": f"used {key}"}]
    [masked, kept] = [
        read_examples([offbook.Trajectory(messages_and_choices=messages)], "m", filter=filter)
        for filter in (None, lambda text: text.replace("use", "lose"))
    ]
    assert masked.redacted == 2 and key not in masked.examples[0].record.model_dump_json()
    assert kept.redacted == 2 and kept.examples[0].record.histories[0].messages[1]["content"] == f"losed {key}"
    assert messages[0]["content"] == f"use {key}"
