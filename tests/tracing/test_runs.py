"""A real run, as sinks show it while it goes on and as the server's records show it afterwards: the same."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbook import (
    LocalBackend,
    TrainableModel,
    TrainConfig,
    Trainer,
    Trajectory,
    auto_trajectory,
    capture_auto_trajectory,
)
from offbook.base.alerts import AlertLimits, signs
from offbook.base.errors import ConfigError
from offbook.base.types import new_id
from offbook.commands import main as cli
from offbook.contracts import CheckpointSaved, EvaluationFinished, GroupsFinished, StepFinished
from offbook.server.stored_models import DirectoryRecords
from offbook.tracing.export import ExportError, export_run, read_records, run_events
from offbook.tracing.jsonl import JsonlSink
from offbook.trainer.progress import PlainProgress
from offbook_langfuse import LangfuseConnection, LangfuseSink
from tests.fakes.trace_server import PUBLIC, SECRET, TraceServer, trace_server

SCENARIOS = [{"id": word, "prompt": f"say the word {word}"} for word in ("blue", "teal")]


class Rollouts:
    """Captured rollouts of one call with rewards 0, 1, 2, ...; the fourth of all raises."""

    def __init__(self, *, same: bool = False) -> None:
        self.numbers, self.same = itertools.count(), same

    async def __call__(self, model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        number = next(self.numbers)

        async def agent() -> None:
            await model.openai_client().chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": scenario["prompt"]}], max_tokens=4
            )
            auto_trajectory(required=True).reward = 1.0 if self.same else float(number)

        trajectory = await capture_auto_trajectory(agent())
        if number == 3:
            raise ValueError("the tool is away")
        return trajectory


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TraceServer]:
    """Langfuse by its variables."""
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "dir"))
    with trace_server() as served:
        monkeypatch.setenv("LANGFUSE_HOST", served.url)
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)
        yield served


def quiet() -> tuple[PlainProgress, io.StringIO]:
    out = io.StringIO()
    return PlainProgress(Console(file=out, width=2000), 9), out


def options(**more: Any) -> Any:
    small = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}
    return {**small, "progress": quiet()[0], **more}


def test_a_run_is_shown_live_and_an_export_from_the_records_lands_on_it(
    model: TrainableModel, local_backend: LocalBackend, server: TraceServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sinks = ["langfuse", JsonlSink(tmp_path / "log")]
    report = Trainer(
        model,
        Rollouts(),
        SCENARIOS,
        eval=SCENARIOS,
        **options(sinks=sinks, alert_limits=AlertLimits(cut_off_share=None)),
    ).train(1)
    assert server.faults_found() == []
    agents = [span for span in server.spans.values() if span.type == "agent"]
    splits = Counter(span.attributes["langfuse.trace.metadata.split"] for span in agents)
    assert splits == {"train": 8, "val": 4}
    [lost] = [span for span in agents if span.error]
    assert lost.error == "ValueError: the tool is away"
    rewards = sorted(
        score["value"] for score in server.scores.values() if score["name"] == "reward" and "traceId" in score
    )
    assert len(rewards) == 11
    sessions = {score["sessionId"] for score in server.scores.values() if "sessionId" in score}
    assert sessions == {f"step-00000/{report.run}", f"step-00001/{report.run}"}
    files = {
        name: (tmp_path / "log" / f"{name}.jsonl").read_text().splitlines()
        for name in ("rollouts", "steps", "evaluations")
    }
    assert {name: len(lines) for name, lines in files.items()} == {"rollouts": 12, "steps": 1, "evaluations": 2}
    metrics = json.loads(files["steps"][0])["metrics"]
    assert metrics["reward"] == report.iterations[0].reward and metrics["tokens/trained"] > 0

    spans, scores = set(server.spans), {id: score["value"] for id, score in server.scores.items()}
    api = asyncio.run(model.api())
    said: list[str] = []
    export_run(api, report.run, [LangfuseSink()], say=said.append)
    assert said == [f"langfuse: 12 rollouts of run {report.run}"] and server.faults_found() == []
    assert set(server.spans) == spans
    again = {id: score["value"] for id, score in server.scores.items()}
    assert again == {id: scores[id] for id in scores.keys() & again.keys()}
    assert {server.scores[id]["name"] for id in scores.keys() - again.keys()} == set()

    server.spans.clear()
    server.scores.clear()
    monkeypatch.setenv("OFFBOOK_API_KEY", api.key or "")
    words = ["traces", "export", "--run", report.run, "--to", "langfuse", "--url", api.url]
    assert cli.guarded(lambda: cli.app(words, standalone_mode=False)) == 0
    assert {key for key in spans if key not in server.spans} <= {key for key in spans if key[0] not in server.traces()}
    from_files = list(run_events(asyncio.run(read_records(DirectoryRecords(local_backend.dir), report.run))))
    assert from_files == list(run_events(asyncio.run(read_records(api, report.run))))
    assert {type(event) for event in from_files} == {GroupsFinished, EvaluationFinished, StepFinished, CheckpointSaved}
    assert server.scores.keys() == scores.keys()
    assert Counter(span.type for span in server.spans.values())["agent"] == 12


def test_an_export_says_what_a_server_did_not_take_and_an_unknown_run(
    model: TrainableModel, local_backend: LocalBackend, server: TraceServer
) -> None:
    run = new_id("run")
    Trainer(model, Rollouts(), SCENARIOS, **options(run=run)).evaluate(SCENARIOS)
    api = asyncio.run(model.api())
    sink = LangfuseSink(LangfuseConnection(server.url, PUBLIC, SECRET), timeout=0.5)
    server.faults.extend([200, 500])
    with pytest.raises(ExportError, match=r"1 events were not taken, .*HTTP 500.*again delivers the rest"):
        export_run(api, run, [sink])
    export_run(api, run, [sink], say=lambda line: None)
    assert Counter(span.type for span in server.spans.values())["agent"] == 2
    for source in (api, DirectoryRecords(local_backend.dir)):
        with pytest.raises(ConfigError, match="has no rollout of a run 'nobody'"):
            export_run(source, "nobody", [sink])


def test_wrong_keys_end_the_run_before_its_first_rollout(
    model: TrainableModel, server: TraceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-other")
    rollouts = Rollouts()
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY"):
        Trainer(model, rollouts, SCENARIOS, **options(sinks=["langfuse"])).train(1)
    assert next(rollouts.numbers) == 0


def test_alerts_stand_in_the_steps_line_and_reach_the_sinks(
    model: TrainableModel, server: TraceServer, tmp_path: Path
) -> None:
    progress, out = quiet()
    limits = AlertLimits(no_spread_share=0.5, no_spread_steps=1, cut_off_share=None)
    more = options(sinks=[JsonlSink(tmp_path)], alert_limits=limits, patience=1, progress=progress)
    report = Trainer(model, Rollouts(same=True), SCENARIOS, **more).train(1)
    assert [alert.kind for alert in report.iterations[0].alerts] == ["no_spread"]
    assert "alert: in 1 steps almost all groups had equal rewards" in out.getvalue()
    assert [json.loads(line)["kind"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()] == ["no_spread"]
    with pytest.raises(ConfigError, match="alert_limits: collapse_share"):
        AlertLimits(collapse_share=-1)


@pytest.mark.parametrize(
    ("equal", "advice"),
    [(1.0, "solved, so use harder"), (0.2, "fail, so use easier"), (None, "of another difficulty")],
)
def test_the_alert_for_equal_rewards_says_in_which_direction_to_go(equal: float | None, advice: str) -> None:
    step = {"groups/total": 4.0, "groups/no_spread": 4.0, "reward/min": 0.0, "reward/max": 1.0}
    known = {} if equal is None else {"groups/no_spread_reward": equal}
    [sign] = signs([step | known] * 3, AlertLimits())
    assert advice in sign.message


@pytest.mark.parametrize(
    ("history", "kinds"),
    [
        ([{"groups/total": 4.0, "groups/no_spread": 4.0}] * 3, ["no_spread"]),
        ([{"groups/total": 4.0, "groups/no_spread": 4.0}] * 2, []),
        ([{"groups/total": 4.0, "groups/no_spread": 3.0}] * 3, []),
        ([{"groups/total": 4.0, "groups/all_good": 1.0, "groups/none_good": 3.0}] * 3, ["no_spread"]),
        ([{"groups/total": 4.0, "groups/all_good": 1.0, "groups/none_good": 2.0, "groups/trained": 1.0}] * 3, []),
        ([{"kl/sampler_learner": 0.06}], ["kl"]),
        ([{"kl/sampler_learner": 0.05, "kl/base": 11.0}], ["kl"]),
        ([{"calls/parse_failure_rate": 0.2}], ["parse_failures"]),
        ([{"calls/cut_off_rate": 0.2}], ["cut_off"]),
        ([{}], []),
        ([], []),
    ],
)
def test_signs_of_a_run_that_goes_wrong(history: list[dict[str, float]], kinds: list[str]) -> None:
    assert [sign.kind for sign in signs(history, AlertLimits())] == kinds


def answers(*steps: tuple[float, float, float]) -> list[dict[str, float]]:
    """Metrics of steps: the share of the commonest answer, its mean reward, and the entropy per token."""
    return [
        {"answers/commonest": share, "answers/commonest_reward": reward, "entropy": entropy}
        | {"reward/min": 0.0, "reward/max": 1.0}
        for share, reward, entropy in steps
    ]


# Runs of `tiny`, 12 tickets x 8 rollouts a step, six labels of which one is right in 60 %, as JSON under a schema.
COLLAPSED = answers((0.729, 0.457, 2.05), (0.875, 0.393, 0.86), (0.979, 0.5, 0.28))
"""Imitation at 2.5e-3 in eight updates a step."""
NEVER_WRONG = answers((0.635, 1.0, 1.9), (0.99, 1.0, 0.6))
"""Every ticket has the same right label."""


@pytest.mark.parametrize(
    ("history", "fires"),
    [
        (COLLAPSED, True),
        (COLLAPSED[:2], False),
        (COLLAPSED[2:], False),  # it began so
        (NEVER_WRONG, False),
        (answers((0.729, 0.457, 2.0), (0.74, 0.5, 0.1)), False),  # shorter answers, as many of them
        (answers((0.02, 0.2, 2.0), (0.11, 0.95, 0.1)), False),  # an answer for each scenario
        ([*COLLAPSED, {"groups/total": 12.0, "groups/none_good": 12.0}], False),  # the step says nothing
    ],
)
def test_the_alert_for_a_collapse_is_for_one_answer_to_all_prompts_that_is_not_right(
    history: list[dict[str, float]], fires: bool
) -> None:
    found = signs(history, AlertLimits())
    assert [sign.kind for sign in found] == ["collapse"] * fires
    if fires:
        assert found[0].message.startswith(
            "98% of the rollouts give the same answer, in the run's first step 73% did: "
        )


def test_a_collapse_is_told_once_and_not_as_scenarios_that_are_too_easy() -> None:
    equal = {"groups/total": 12.0, "groups/all_good": 9.0, "groups/none_good": 3.0}
    history = [step | equal for step in (*COLLAPSED, *COLLAPSED[2:], *COLLAPSED[2:])]
    assert [sign.kind for sign in signs(history, AlertLimits())] == ["collapse"]


@pytest.mark.parametrize(("good", "advice"), [(3.0, "solved, so use harder"), (1.0, "fail, so use easier")])
def test_the_alert_for_groups_that_are_all_good_or_not_says_in_which_direction_to_go(good: float, advice: str) -> None:
    step = {"groups/total": 4.0, "groups/no_spread": 0.0, "groups/all_good": good, "groups/none_good": 4 - good}
    [sign] = signs([step] * 3, AlertLimits())
    assert "were all good or had no good rollout" in sign.message and advice in sign.message


def test_events_keep_their_ids_when_they_are_made_again() -> None:
    one = StepFinished("r", "m", 3, 2, 1.0, {})
    assert one.id == StepFinished("r", "m", 3, 2, 9.0, {"a": 1.0}).id != StepFinished("r", "m", 3, 3, 1.0, {}, "x").id
    assert (
        EvaluationFinished("r", "m", "val", 3, 1.0, {}).id != EvaluationFinished("r", "m", "val", 3, 1.0, {}, ("g",)).id
    )
