"""A teacher on a real vLLM server scores as the same policy scores here, and one of another tokenizer is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from offbook.base.config import LoraOptions, TeacherKL, TrainConfig
from offbook.base.errors import ConfigError, TrainError
from offbook.base.types import Sampling, TrainResult
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.targets.advantage import group_advantages, with_teacher
from offbook.engine.learner.targets.batch import TrainBatch, make_batch
from offbook.engine.learner.teacher import endpoint_scores, with_hint
from offbook.engine.protocol import JobTrajectory, Sample
from offbook.tiny import path
from tests.engine.learner.jobs import command, sample
from tests.engine.learner.test_teacher import logprobs
from tests.production.test_vllm_lora import vllm


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(path(), LoraOptions(), threads=1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, require: Callable[[bool, str], None]) -> Iterator[str]:
    """The name of the tiny policy on a vLLM server."""
    if sys.platform != "linux":
        pytest.skip("vLLM runs on Linux")
    require(find_spec("vllm") is not None, "scripts/bootstrap test")
    with vllm(tmp_path_factory.mktemp("vllm"), path(), "big") as url:
        yield f"openai/big?api_base={url}"


def calls(policy: Policy) -> list[Sample]:
    """Two turns of a conversation, one call at another temperature, and one under a grammar."""
    encode = policy.chat_template.encode
    first = encode("<|im_start|>user\nA caf\u00e9 for two, please<|im_end|>\n<|im_start|>assistant\n", special=True)
    answer = encode("Yes: at 9, caf\u00e9 \U0001f600<|im_end|>", special=True)
    second = [*first, *answer, *encode("\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n", special=True)]
    return [
        sample("c0", first, answer),
        sample("c1", second, encode("You are welcome<|im_end|>", special=True)),
        sample("c2", second, answer[:3], sampling=Sampling(temperature=0.7)),
        sample("c3", second, answer[:2], constrained="response_format"),
    ]


def batch_of(samples: list[Sample]) -> TrainBatch:
    trajectory = JobTrajectory("t", None, tuple(samples))
    advantages = with_teacher(group_advantages([[None]], min_group_size=2, divide_by_std=False), [[False]])
    return make_batch([[trajectory]], advantages)


def endpoint(teacher: str) -> TeacherKL:
    return TeacherKL(teacher=teacher, alone=True)


@pytest.mark.slow("real vLLM")
def test_its_logprobs_are_those_of_the_same_policy_here_also_behind_a_hint(policy: Policy, teacher: str) -> None:
    place, batch = endpoint(teacher).endpoint, batch_of(calls(policy))
    assert place is not None
    hint = "Answer in the form of the third example."
    template = policy.chat_template
    before = template.encode(template.render(({"role": "system", "content": hint},), None))
    for shown, ids in ((batch, ()), (with_hint(batch, hint, policy), before)):
        scores = endpoint_scores(place, shown, policy.tokenizer, lambda *_: None)
        with torch.no_grad():
            expected = torch.cat([logprobs(policy, call, ids) for call in batch.samples[:2]])
        scored = len(expected)
        assert float((scores.logprobs[:scored] - expected).abs().max()) < 1e-3
        assert bool(scores.kept[:scored].all()) and not bool(scores.kept[scored:].any())


@pytest.mark.slow("real vLLM")
def test_a_step_is_that_of_the_same_teacher_here(policy: Policy, teacher: str, tmp_path: Path) -> None:
    groups = [[JobTrajectory("t", None, tuple(calls(policy)[:2]))]]

    def steps(name: str, distill: TeacherKL) -> TrainResult:
        learner = Learner(policy, "tiny", lambda _: None)
        config = TrainConfig(learning_rate=1e-2, distill=distill)
        learner.train(command(tmp_path / name, groups, 0, TrainConfig(learning_rate=1e-2, loss="cross_entropy")))
        return learner.train(command(tmp_path / name, groups, 1, config))

    there, here = steps("there", endpoint(teacher)), steps("here", TeacherKL(teacher="tiny", alone=True))
    assert abs(here.metrics["kl/teacher"]) > 0.01
    for metric in ("kl/teacher", "loss", "grad_norm"):
        if metric in here.metrics:
            assert there.metrics[metric] == pytest.approx(here.metrics[metric], abs=1e-3, rel=1e-3), metric
    assert (there.step, there.metrics["tokens/untaught"]) == (2, 0)


@pytest.mark.slow("real vLLM")
def test_another_tokenizer_and_whatever_vllm_refuses_are_named(policy: Policy, teacher: str, tmp_path: Path) -> None:
    place, batch = endpoint(teacher).endpoint, batch_of(calls(policy))
    assert place is not None
    shutil.copytree(path(), tmp_path / "swapped")
    file = tmp_path / "swapped" / "tokenizer.json"
    written = json.loads(file.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(written))
    with pytest.raises(
        TrainError, match=r"teacher big at http.* has another tokenizer than this base .*reads a text as"
    ):
        endpoint_scores(place, batch, AutoTokenizer.from_pretrained(tmp_path / "swapped"), lambda *_: None)
    larger = AutoTokenizer.from_pretrained(path())
    larger.add_tokens(["<|one_more|>"])
    with pytest.raises(TrainError, match=r"has another tokenizer than this base|/detokenize was answered with status"):
        endpoint_scores(place, batch, larger, lambda *_: None)
    with pytest.raises(TrainError, match=r"status 404: .*other"):
        endpoint_scores(replace(place, model="other"), batch, policy.tokenizer, lambda *_: None)
    long = batch_of([sample("c", [5] * 3000, [6])])
    with pytest.raises(TrainError, match=r"/v1/completions was answered with status 400: .*2048"):
        endpoint_scores(place, long, policy.tokenizer, lambda *_: None)


def test_a_teacher_elsewhere_that_cannot_score_stops_the_step(policy: Policy) -> None:
    place, batch = endpoint("openai/big?api_base=http://127.0.0.1:9/v1").endpoint, batch_of(calls(policy))
    assert place is not None and (place.model, place.root) == ("big", "http://127.0.0.1:9")
    with pytest.raises(TrainError, match=r"the teacher big at http://127\.0\.0\.1:9: /detokenize was not answered"):
        endpoint_scores(place, batch, policy.tokenizer, lambda *_: None)
    with pytest.raises(TrainError, match=r"at temperature 1, without top-p.*None of 5 was"):
        endpoint_scores(place, batch_of(calls(policy)[2:]), policy.tokenizer, lambda *_: None)


@pytest.mark.parametrize(
    "teacher",
    ["openai/?api_base=http://x", "openai/big?api_base=x", "a?api_base=http://x", "openai/b?api_base=http://x&k=1"],
)
def test_a_teachers_address_is_checked_where_it_is_written(teacher: str) -> None:
    with pytest.raises(ConfigError, match=r"write openai/NAME\?api_base=URL"):
        TeacherKL(teacher=teacher)
