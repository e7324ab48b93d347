"""Token by token, the numbers of a real step's pages are those that the learner computed, and those of a second computation
with transformers and PEFT."""

from __future__ import annotations

import html
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from offbook import tiny
from offbook.base.types import Call
from offbook.engine import checkpoint_files, token_file
from offbook.engine.token_file import TRAINED, TokenFile
from offbook.server.models.checkpoints import state_of
from offbook.server.records.database import open_records
from offbook.server.records.overview import RolloutRow
from offbook.server.views.numbers import fixed, number, seconds, signed
from offbook_dashboard.page_urls import trajectory_url
from offbook_dashboard.source import DashboardSource
from tests.dashboard.conftest import KEPT
from tests.dashboard.recorded_run import MODEL, RUN

pytestmark = pytest.mark.slow("whole trainings")

STEP = 2
"""Of the policy; its update is the last of the run."""


@dataclass(frozen=True)
class RecordedStep:
    """A step as it was recorded: what its rollouts were and what the learner wrote of them."""

    rollouts: dict[str, RolloutRow]
    calls: dict[str, Call]
    file: TokenFile


@pytest.fixture
async def step(recorded: Path) -> RecordedStep:
    records = open_records(recorded)
    source = DashboardSource(records, recorded)
    rollouts = {row.id: row for row in await source.rollouts(RUN, STEP) if row.split == "train"}
    found = [await source.trajectory(name) for name in rollouts]
    records.close()
    calls = {call.id: call for each in found if each is not None for call in each.calls}
    folder = recorded / "pages" / "models" / MODEL / "tokens"
    return RecordedStep(rollouts, calls, token_file.read(token_file.path_of(folder, STEP + 1)))


def page_of(dashboard: str, path: str) -> str:
    answer = httpx.get(dashboard + path, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def token_data(page: str) -> list[dict[str, Any]]:
    """What a rollout's page knows of its answers."""
    found = re.search(r'<script type="application/json" id="token-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


def test_the_token_view_has_the_learners_arrays(step: RecordedStep, dashboard: str) -> None:
    assert step.file.head.calls
    for name in {call.trajectory for call in step.file.head.calls}:
        page = page_of(dashboard, trajectory_url(name))
        answers = [answer for answer in token_data(page) if "advantage" in answer]
        trained = {call.call_id: call for call in step.file.head.calls_of(name)}
        assert len(answers) == len(trained)
        for answer, call in zip(answers, trained.values(), strict=True):
            here = slice(call.offset, call.offset + call.tokens)
            assert answer["ids"] == step.file.token_ids[here].tolist()
            assert answer["advantage"] == call.advantage and answer["weight"] == call.weight
            assert answer["kept"] == ((step.file.flags[here] & TRAINED) > 0).tolist()
            for column, array in (
                ("recorded", step.file.recorded),
                ("logprob", step.file.logprobs),
                ("ratio", step.file.ratios),
                ("entropy", step.file.entropy),
                ("coefficient", step.file.coefficients),
            ):
                kept = np.array(answer[column], np.float64)
                np.testing.assert_allclose(kept, array[here].astype(np.float64), rtol=1e-8, err_msg=column)
            words = f"{call.tokens} tokens, advantage \N{MULTIPLICATION SIGN} weight {signed(call.advantage)}"
            assert words in re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]+>", "", page)))


def test_the_numbers_are_those_of_transformers_peft_and_the_rewards(
    step: RecordedStep, recorded: Path, dashboard: str
) -> None:
    adapter = recorded / "pages" / "models" / MODEL / "checkpoints" / f"{STEP:04d}"
    base = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, adapter).eval()
    groups: dict[str | None, list[float]] = {}
    for row in step.rollouts.values():
        assert row.reward is not None
        groups.setdefault(row.group, []).append(row.reward)
    for name in {call.trajectory for call in step.file.head.calls}:
        row = step.rollouts[name]
        assert row.reward is not None
        rewards = groups[row.group]
        advantage = (row.reward - statistics.fmean(rewards)) / statistics.pstdev(rewards)
        answers = [answer for answer in token_data(page_of(dashboard, trajectory_url(name))) if "advantage" in answer]
        for answer, line in zip(answers, step.file.head.calls_of(name), strict=True):
            call = step.calls[line.call_id]
            output = call.outputs[line.index]
            logprobs, entropy = reference(policy, call.prompt_ids, output.token_ids)
            assert answer["ids"] == list(output.token_ids)
            assert answer["advantage"] == pytest.approx(advantage * answer["weight"], rel=1e-4)
            np.testing.assert_allclose(answer["recorded"], np.array(output.logprobs, np.float32), rtol=1e-6)
            np.testing.assert_allclose(answer["logprob"], logprobs, atol=2e-3)
            np.testing.assert_allclose(answer["entropy"], entropy, atol=5e-3)
            ratios = np.exp(logprobs - np.array(output.logprobs, np.float64))
            np.testing.assert_allclose(answer["ratio"], ratios, rtol=5e-3)


def reference(policy: Any, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> tuple[Any, Any]:
    """Logprob of each sampled token and entropy of its distribution, in nats, at temperature 1."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[torch.arange(len(sampled)), torch.tensor(sampled)]
    return chosen.numpy(), -(logprobs.exp() * logprobs).sum(-1).numpy()


def test_a_steps_facts_are_the_learners_metrics(recorded: Path, dashboard: str) -> None:
    folder = recorded / "pages" / "models" / MODEL / "checkpoints"
    for step in (0, 1, 2):
        metrics = state_of(checkpoint_files.read(checkpoint_files.path_of(folder, step + 1))).metrics
        page = page_of(dashboard, f"/runs/{RUN}/steps/{step}?split=train")
        facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>(.*?)</dd>", page))
        notes = {name: re.sub(r"\s*<[^>]+>", "|", fact) for name, fact in facts.items()}
        assert notes["Reward"] == f"{fixed(metrics['reward/mean'], 3)}|spread {fixed(metrics['reward/std'], 3)}|"
        assert notes["Training took"] == (
            f"{seconds(metrics['seconds/total'])}|{number(metrics['tokens/trained'])} tokens|"
        )
        assert notes["Gradient from"].split("|")[0] == (
            f"{number(metrics['groups/trained'])} of {number(metrics['groups/total'])}"
        )
        assert notes["Next step"].split("|")[0] == str(step + 1)


def test_the_learner_keeps_the_tokens_of_the_last_steps_only(recorded: Path, dashboard: str) -> None:
    folder = recorded / "pages" / "models" / MODEL / "tokens"
    assert sorted(path.name for path in folder.iterdir()) == ["0002.safetensors", "0003.safetensors"]
    assert KEPT == 2
    page = page_of(dashboard, f"/runs/{RUN}/steps/0?split=train")
    rollouts = re.findall(r'<a class="p[^"]*" href="(/trajectories/[^"]+)"', page)
    if rollouts:  # above its group's mean, so it was trained
        swept = page_of(dashboard, rollouts[0])
        assert "have been deleted" in swept and "Logprob</a>" in swept
        assert all("logprob" not in answer and answer["recorded"] for answer in token_data(swept))
