"""The plugin in vLLM's processes gives what vLLM itself gives. Each case is a process of its own: vLLM changes its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from understudy.engine.inference import vllm_plugin
from understudy.tiny import path as tiny_policy


@pytest.fixture
def needs_vllm(require: Callable[[bool, str], None]) -> None:
    require(find_spec("vllm") is not None, "scripts/bootstrap test")


SAME_LOGPROBS = """
import torch
from vllm.v1.sample.sampler import Sampler

from understudy.engine.inference import vllm_plugin

theirs = Sampler.gather_logprobs
vllm_plugin.register()
assert Sampler.gather_logprobs is not theirs and Sampler.gather_logprobs.__wrapped__ is theirs
shapes = [(1, 1536, 0), (16, 1536, 0), (3, 1536, 2), (2, vllm_plugin.SMALL, 0)]
for rows, vocabulary, alternatives in shapes:
    logits = torch.randn(rows, vocabulary)
    logits[0, :5] = logits[0, 7]  # ties count for the rank
    logits[-1, 9:] = -torch.inf  # as top_k leaves it
    logprobs = logits.log_softmax(-1)
    for ids in (torch.full((rows,), 7), torch.zeros(rows, dtype=torch.long), torch.full((rows,), vocabulary - 1)):
        ours = Sampler.gather_logprobs(logprobs, alternatives, token_ids=ids)
        for mine, other in zip(ours[:3], theirs(logprobs.clone(), alternatives, ids)[:3], strict=True):
            assert mine.dtype == other.dtype and mine.shape == other.shape and torch.equal(mine, other)
print("same")
"""

SAME_TEXTS = """
import sys

import numpy as np
from transformers import AutoTokenizer
from vllm.v1.engine import logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from understudy.engine.inference import vllm_plugin

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


def texts():
    seen = LogprobsProcessor(tokenizer, [], None, 0.0, 0, None)
    for token in tokenizer.encode("A caf\\u00e9 \\u2014 \\U0001f600 twice: \\U0001f600<|im_end|>"):
        ids, values = np.array([[token]], dtype=np.int32), np.array([[-0.5]], dtype=np.float32)
        seen._update_sample_logprobs(LogprobsLists(ids, values, np.array([3])))
    return [entry for position in seen.logprobs for entry in position.items()], seen.cumulative_logprob


before = texts()
vllm_plugin.register()
assert logprobs.convert_ids_list_to_tokens is vllm_plugin.texts
assert texts() == before and texts() == before and len(before[0]) > 10
print("same")
"""

FLAT = """
from types import SimpleNamespace

import numpy as np
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from understudy.engine.inference import vllm_plugin

vllm_plugin.register()


def seen(alternatives, extra):
    params = SamplingParams(logprobs=alternatives, extra_args=extra)
    made = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=params))
    for values in ([[-0.5]], [[-np.inf]], [[-1.5], [-2.0]]):
        rows = np.repeat(np.array(values, np.float32), (alternatives or 0) + 1, axis=1)
        made._update_sample_logprobs(LogprobsLists(np.full(rows.shape, 7), rows, np.ones(len(rows), dtype=int)))
    return made


def shown(serving, ids, logprobs):
    return OpenAIServingChat._create_chat_logprobs(serving, ids, logprobs, None, 0, None, False).model_dump()


serving = SimpleNamespace(return_tokens_as_token_ids=False, _get_decoded_token=lambda *a: "t", _get_top_logprobs=lambda *a, **k: [])
plain, flat = seen(0, None), seen(0, {"flat_logprobs": 1})
assert flat.cumulative_logprob == plain.cumulative_logprob == -np.inf
expected = [item["logprob"] for item in shown(serving, [7] * 4, plain.logprobs)["content"]]
assert expected == [-0.5, -9999.0, -1.5, -2.0]
assert shown(serving, [7] * 4, flat.logprobs) == {"content": [], "token_logprobs": expected}
assert shown(serving, [7], flat.logprobs[-1:]) == {"content": [], "token_logprobs": [-2.0]}
assert shown(serving, [], flat.logprobs[:0]) == {"content": []}
assert type(seen(2, {"flat_logprobs": 1}).logprobs) is type(seen(2, None).logprobs) is list
assert LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=SamplingParams(extra_args={"flat_logprobs": 1}))).logprobs is None
print("same")
"""

UNTOUCHED = """
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.v1.engine import logprobs
from vllm.v1.sample.sampler import Sampler

from understudy.engine.inference import vllm_plugin


def replaced():
    theirs = logprobs.LogprobsProcessor
    return (
        Sampler.gather_logprobs,
        logprobs.convert_ids_list_to_tokens,
        theirs.from_new_request,
        theirs._update_sample_logprobs,
        OpenAIServingChat._create_chat_logprobs,
    )


vllm_plugin.KNOWN_VERSION = KNOWN
before = replaced()
vllm_plugin.register()
assert replaced() == before
print("same")
"""


def run(script: str, *, switch: str | None) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name != vllm_plugin.SWITCH}
    environment = others | ({vllm_plugin.SWITCH: switch} if switch else {}) | {"VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", script, str(tiny_policy())]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0 and ended.stdout.endswith("same\n"), ended.stdout + ended.stderr
    return ended


@pytest.mark.usefixtures("needs_vllm")
@pytest.mark.parametrize("script", [SAME_LOGPROBS, SAME_TEXTS, FLAT], ids=["logprobs", "texts", "flat"])
def test_answers_are_those_of_vllm_itself(script: str) -> None:
    run(script, switch="1")


@pytest.mark.usefixtures("needs_vllm")
def test_another_version_is_left_as_it_is_and_the_log_says_so() -> None:
    ended = run(UNTOUCHED.replace("KNOWN\n", "'9.9'\n"), switch="1")
    assert "computes logprobs in its own, slower way: this Understudy knows 9.9" in ended.stderr


@pytest.mark.usefixtures("needs_vllm")
def test_a_vllm_that_is_not_ours_is_left_as_it_is() -> None:
    run(UNTOUCHED.replace("KNOWN\n", "vllm_plugin.KNOWN_VERSION\n"), switch=None)


def test_vllm_finds_it_by_its_entry_point() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "understudy")
    assert found.load() is vllm_plugin.register
