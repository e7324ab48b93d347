"""`offbook learn`: rounds on the recorded traffic of a route, promoted only by traffic that never trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base import clock
from offbook.base.errors import ConfigError
from offbook.base.types import CallStatus, CallTrace, OutputTrace, RolloutPlace, Sampling
from offbook.base.wire import TrajectoryRecord
from offbook_auto import learn
from offbook_auto.learn import STATE, Learning, LearnOptions, Thread
from offbook_compare.targets import RolloutTarget
from offbook_production.wire import AuditRequest, Removal, TrajectoryAudit

ANSWER = "blue"
FAST = offbook.SFTConfig(learning_rate=5e-3, batch_size=16, epochs=8, schedule="constant", warmup=0, skip_bad=True)


def thread(number: int, run: str, *, score: float = 1.0, age: float = 0.0) -> TrajectoryRecord:
    """A thread on a paid model, as the gateway records it."""
    answer = OutputTrace(
        index=0, message={"role": "assistant", "content": ANSWER}, finish_reason="stop", status=CallStatus.COMPLETE,
        tokens=1, logprob_mean=None, logprob_min=None,
    )  # fmt: skip
    ended, name = clock.now() - age, f"{run}-{number}"
    call = CallTrace(
        id=f"{name}.call", trajectory_id=name, model="openai/gpt-4.1", step=0, status=CallStatus.COMPLETE,
        sampling=Sampling(), messages=({"role": "user", "content": question(number)},), tools=None,
        started_at=ended, ended_at=ended, prompt_tokens=3, outputs=(answer,),
    )  # fmt: skip
    place = RolloutPlace(run=run, split="traffic")
    return TrajectoryRecord(
        id=name, model="openai/gpt-4.1", calls=(), outside_calls=(call,), reward=score, started_at=ended, ended_at=ended, place=place
    )  # fmt: skip


def question(number: int) -> str:
    return f"which colour has box {number}?"


def held_out(number: int) -> bool:
    return Thread("", question(number), "", None).held_out(LearnOptions(route="desk").held_out)


async def asked(model: Any, scenario: Any) -> offbook.Trajectory:
    trajectory = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
    answer = await model.openai_client().chat.completions.create(
        model=model.inference_name(), messages=trajectory.messages(), max_completion_tokens=8
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    trajectory.reward = float((answer.choices[0].message.content or "").strip() == ANSWER)
    return trajectory


@pytest.mark.slow("trains and compares for minutes on a CPU")
async def test_a_round_promotes_what_does_better_on_questions_that_never_train(
    local_backend: offbook.LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offbook.TrainableModel(name="goes-on", project="tests", base_model="tiny", backend=local_backend)
    api, run = await model.api(), "route/colours"
    await api.finish([thread(number, run) for number in range(100)])
    await api.finish([thread(1000, run, age=20 * 86_400), thread(1001, run, score=0.0)])
    options: dict[str, Any] = {"route": "colours", "min_reward": 1.0, "sft": FAST, "output": tmp_path / "state"}
    app = RolloutTarget(asked)

    strict = Learning(app, model, LearnOptions(**options, gain=2.0))
    real = learn.acompare

    async def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(learn, "acompare", killed)
    with pytest.raises(KeyboardInterrupt):
        await strict.once()
    trained = (await api.model("goes-on-learn-1")).step
    monkeypatch.setattr(learn, "acompare", real)
    refused = await strict.once()
    assert refused is not None and (refused.step, refused.promoted) == (trained, None)
    assert refused.decided.startswith("not promoted: goes-on-learn-1@") and "which is not above 2" in refused.decided
    assert (await api.model("goes-on")).step == 0
    assert set(refused.imitated) == {f"{run}-{number}" for number in range(100) if not held_out(number)}

    easy = Learning(app, model, LearnOptions(**options))
    promoted = await easy.once()  # what a refused step saw is new to the step that serves
    assert promoted is not None and promoted.promoted == 1 and promoted.decided.startswith("promoted: goes-on-learn-2@")
    assert promoted.difference is not None and promoted.difference.low > 0
    assert (await api.model("goes-on")).step == 1
    assert await easy.once() is None
    assert not (tmp_path / "state" / "comparison").exists()
    kept = (tmp_path / "state" / STATE).read_text()
    assert [one["candidate"] for one in json.loads(kept)["rounds"]] == ["goes-on-learn-1", "goes-on-learn-2"]
    assert "box" not in kept

    request = AuditRequest(trajectory_ids=(promoted.imitated[0], promoted.held_out[0]))
    [imitated, never] = await api.ask(list[TrajectoryAudit], "POST", "/api/audit", request)
    assert imitated.seen_since["goes-on"] == 1 and never.trained == () and never.seen_since == {}
    request = AuditRequest(trajectory_ids=(promoted.imitated[0],))
    removal = await api.ask(Removal, "POST", "/api/audit/removal", request)
    assert removal.erased and removal.trajectories[0].seen_since["goes-on"] == 1


def test_a_question_is_held_out_in_every_thread_and_every_run() -> None:
    shares = [held_out(number) for number in range(1000)]
    assert 150 < sum(shares) < 250
    spoken = Thread("a", "Which  colour has BOX 7?", "", None)
    assert spoken.held_out(0.2) == held_out(7)
    assert all(Thread("b", question(number), "", None).held_out(0.5) for number in range(1000) if shares[number])


@pytest.mark.parametrize(
    ("options", "told"),
    [({"route": ""}, "route"), ({"route": "a", "held_out": 1.0}, "held_out"), ({"route": "a", "least": 0}, "least")],
)
def test_wrong_options_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LearnOptions(**options)


HOLD = """
import sys, time
from pathlib import Path
from offbook.base.locked_folders import held_folder
with held_folder(Path(sys.argv[1]), "--output"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_on_the_same_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    model = offbook.TrainableModel("agent", base_model="tiny")

    async def rollout(model: Any, scenario: Any) -> offbook.Trajectory:
        raise AssertionError("no round begins")

    learning = Learning(RolloutTarget(rollout), model, LearnOptions(route="desk", output=tmp_path / "state"))
    first = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "state"], stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"--output .*state: another process .*pid {first.pid}"), learning.held():
            pass
    finally:
        first.kill()
        first.wait()
    with learning.held():  # a killed holder holds nothing
        pass
