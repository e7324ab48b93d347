"""Answers that had to be one of some texts: the learner masks the other tokens, as the sampler did."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

import offbook
from offbook.base.config import TrainConfig
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.batch import ChoiceMasks
from offbook.engine.protocol import JobTrajectory, Sample
from tests.engine.learner.jobs import LORA, command, sample
from tests.families.builders import ATTENTION, QWEN2_5, Family, build
from tests.families.test_embedded_tool_calls import engine

TEXTS = ("Monday", "Mon", "the 4821 warehouse")


def choices(http: TestClient, count: int, **settings: Any) -> list[tuple[str, Sample]]:
    """Texts that the engine sampled from the list, and the calls."""
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "Where is order 4821?"}],
        "structured_outputs": {"choice": list(TEXTS)},
        "n": count,
        "seed": 1,
        "max_tokens": 40,
        "logprobs": True,
        "return_token_ids": True,
        "temperature": 1.0,
        **settings,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    raw = answer.json()
    constraint = "structured_outputs" if body["structured_outputs"] else "response_format"
    return [
        (
            choice["message"]["content"],
            sample(
                f"call-{choice['index']}",
                raw["prompt_token_ids"],
                choice["token_ids"],
                [token["logprob"] for token in choice["logprobs"]["content"]],
                constrained=constraint,
                allowed_texts=TEXTS if body["structured_outputs"] else (),
            ),
        )
        for choice in raw["choices"]
    ]


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("family", ATTENTION, ids=lambda family: family.name)
def test_the_learner_gives_an_answer_from_a_list_the_samplers_logprobs(family: Family, tmp_path: Path) -> None:
    folder = build(family, tmp_path / "base")
    with engine(folder) as http:
        texts, calls = zip(*choices(http, 6), strict=True)
    assert set(texts) <= set(TEXTS)
    group = [JobTrajectory(f"rollout-{i}", float(i), (call,)) for i, call in enumerate(calls)]
    learner = Learner(Policy.load(folder, LORA, threads=1), "base", lambda _: None)
    result = learner.train(command(tmp_path, [group], 0, TrainConfig(kl_coef=0.1, learning_rate=1e-2)))
    assert result.applied and result.warnings == ()
    metrics = result.metrics
    assert metrics["tokens/trained"] == sum(len(call.completion_ids) for call in calls)
    assert metrics["kl/sampler_learner_max_diff"] < 1e-3
    assert (metrics["tokens/unmeasured"], metrics["calls/constrained_share"]) == (0, 0)
    assert metrics["kl/base"] == pytest.approx(0, abs=1e-6)  # before the first update the policy is the base
    assert metrics["entropy"] < np.log(len(TEXTS)) + 3  # of the allowed tokens: the whole vocabulary has 6 nats


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("family", ATTENTION, ids=lambda family: family.name)
def test_json_has_one_blank_in_a_row_and_the_learner_sees_the_answers_of_the_sampler(
    family: Family, tmp_path: Path
) -> None:
    folder = build(family, tmp_path / "base")
    size = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}
    schema = {"type": "object", "properties": {"on": size}, "required": ["on"], "additionalProperties": False}
    policy = Policy.load(folder, LORA, threads=1)
    blank = [
        token for token in range(policy.vocabulary) if (text := policy.decode([token])) and not text.strip(" \n\t")
    ]
    fields = {
        "structured_outputs": None,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "logit_bias": {str(token): 5 for token in blank},
        "max_tokens": 60,
    }
    with engine(folder) as http:
        answers = [choice for _ in range(2) for choice in choices(http, 4, **fields)]
    texts = [text for text, _ in answers]
    assert any(" " in text or "\n" in text for text in texts) and not any(re.search(r"\s\s", text) for text in texts)
    rollouts = [JobTrajectory(str(i), float(i % 2), (call,)) for i, (_, call) in enumerate(answers)]
    learner = Learner(policy, "base", lambda _: None)
    metrics = learner.train(command(tmp_path, [rollouts[:4], rollouts[4:]], 0, TrainConfig())).metrics
    parsed = Counter(json.dumps(json.loads(text)) for text in texts)
    assert metrics["answers/commonest"] == max(parsed.values()) / len(texts)


async def test_answers_of_a_server_from_a_list_are_trained_with_the_samplers_mask(
    local_backend: offbook.LocalBackend,
) -> None:
    model = offbook.TrainableModel("choices", base_model="tiny", backend=local_backend)
    messages: list[Any] = [{"role": "user", "content": "Is it a question?"}]
    answer = await model.openai_client().chat.completions.create(
        model=model.inference_name(),
        messages=messages,
        n=4,
        temperature=2.0,
        extra_body={"structured_outputs": {"choice": ["yes", "no", "perhaps", "never"]}},
    )
    rollouts = [
        offbook.Trajectory(messages_and_choices=[*messages, choice], reward=float(i))
        for i, choice in enumerate(answer.choices)
    ]
    result = await model.train([offbook.TrajectoryGroup(rollouts)], kl_coef=0.1, pbar_desc=None)
    assert (result.metrics["tokens/unmeasured"], result.metrics["calls/constrained_share"]) == (0, 0)
    assert result.metrics["kl/sampler_learner_max_diff"] < 1e-3
    assert result.metrics["kl/base"] == pytest.approx(0, abs=1e-6)


def test_an_answer_that_the_list_does_not_allow_stays_constrained(tmp_path: Path) -> None:
    policy = Policy.load(build(QWEN2_5, tmp_path / "base"), LORA, threads=1)
    masks = ChoiceMasks(lambda: policy.tokenizer, lambda: policy.end_ids, policy.vocabulary)
    ids: list[int] = policy.tokenizer.encode("Monday", add_special_tokens=False)
    [end, *_] = sorted(policy.end_ids)
    allowed = masks(sample("a", [1], [*ids, end], allowed_texts=TEXTS))
    assert allowed is not None and len(allowed) == len(ids) + 1
    assert set(allowed[-1].tolist()) == policy.end_ids
    assert masks(sample("b", [1], [*policy.tokenizer.encode("Tuesday"), end], allowed_texts=TEXTS)) is None
    assert masks(sample("c", [1], [*ids, end])) is None
