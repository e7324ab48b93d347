"""The plugin in vLLM's processes gives what vLLM itself gives. Each case is a process of its own: vLLM changes its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from offbook.engine.inference.vllm import plugin as vllm_plugin
from offbook.tiny import path as tiny_policy


@pytest.fixture
def needs_vllm(require: Callable[[bool, str], None]) -> None:
    require(find_spec("vllm") is not None, "scripts/bootstrap test")


SAME = """
import sys
from types import SimpleNamespace

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.v1.engine import logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from offbook.engine.inference.vllm import plugin as vllm_plugin

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


vllm_plugin.register()


# ---- plain lists, for calls that ask
def seen(alternatives, extra):
    params = SamplingParams(logprobs=alternatives, extra_args=extra)
    made = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=params))
    for values in ([[-0.5]], [[-np.inf]], [[-1.5], [-2.0]]):
        rows = np.repeat(np.array(values, np.float32), (alternatives or 0) + 1, axis=1)
        made._update_sample_logprobs(LogprobsLists(np.full(rows.shape, 7), rows, np.ones(len(rows), dtype=int)))
    return made


def shown(ids, logprobs):
    return OpenAIServingChat._create_chat_logprobs(serving, ids, logprobs, None, 0, None, False).model_dump()


serving = SimpleNamespace(_get_decoded_token=lambda *a: "t", _get_top_logprobs=lambda *a, **k: [])
asked = {"flat_logprobs": 1}
plain, flat = seen(0, None), seen(0, asked)
assert flat.cumulative_logprob == plain.cumulative_logprob == -np.inf
expected = [item["logprob"] for item in shown([7] * 4, plain.logprobs)["content"]]
assert expected == [-0.5, -9999.0, -1.5, -2.0]
assert shown([7] * 4, flat.logprobs) == {"content": [], "token_logprobs": expected}
assert shown([7], flat.logprobs[-1:]) == {"content": [], "token_logprobs": [-2.0]}
assert shown([], flat.logprobs[:0]) == {"content": []}
assert type(seen(2, asked).logprobs) is type(seen(2, None).logprobs) is list
none = SimpleNamespace(sampling_params=SamplingParams(extra_args=asked))
assert LogprobsProcessor.from_new_request(None, none).logprobs is None
print("same")
"""

BLANKS = """
import json
import sys
from types import SimpleNamespace

from transformers import AutoTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from offbook.engine.inference.vllm import plugin as vllm_plugin

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
config = SimpleNamespace(
    structured_outputs_config=SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False),
    model_config=None,
    speculative_config=None,
)
# `json_schema` is also the name of a property here, which stays one
properties = {"on": {"type": "boolean"}, "type": {"const": "json_schema"}}
schema = {"type": "object", "properties": properties, "required": ["on", "type"], "additionalProperties": False}
tag = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</call>", "type": "tag"}
whole = {"type": "structural_tag", "format": tag}


def accepts(text, kind, spec, backend):
    grammar = backend.compile_grammar(kind, json.dumps(spec))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return len(grammar.validate_tokens(ids)) == len(ids)


def accepted(backend, blanks):
    text = f'{{"on":{blanks}true,{blanks}"type":{blanks}"json_schema"}}'
    yield accepts(text, Kind.JSON, schema, backend)
    yield accepts(f'{{"x":{blanks}1}}', Kind.JSON_OBJECT, {}, backend)
    if isinstance(backend, XgrammarBackend):
        yield accepts(f"<call>{text}</call>", Kind.STRUCTURAL_TAG, whole, backend)


backends = [made(config, tokenizer=tokenizer, vocab_size=len(tokenizer)) for made in (XgrammarBackend, GuidanceBackend)]
texts = ["", " ", "  ", "\\n  "]
assert all(all(accepted(backend, blanks)) for backend in backends for blanks in texts)
vllm_plugin.register()
backends = [made(config, tokenizer=tokenizer, vocab_size=len(tokenizer)) for made in (XgrammarBackend, GuidanceBackend)]
found = [[list(accepted(backend, blanks)) for blanks in texts] for backend in backends]
assert found == [[[True] * 3] * 2 + [[False] * 3] * 2, [[True] * 2] + [[False] * 2] * 3], found
print("same")
"""

UNTOUCHED = """
import os

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.renderers.hf import HfRenderer
from vllm.v1.engine import logprobs

from offbook.engine.inference.vllm import plugin as vllm_plugin


def replaced():
    theirs = logprobs.LogprobsProcessor
    return (
        theirs.from_new_request,
        theirs._update_sample_logprobs,
        OpenAIServingChat._create_chat_logprobs,
        HfRenderer.render_messages_async,
    )


before = replaced()
known, vllm_plugin.KNOWN_VERSION = vllm_plugin.KNOWN_VERSION, "9.9"
vllm_plugin.register()
assert replaced() == before
vllm_plugin.KNOWN_VERSION = known
del os.environ[vllm_plugin.SWITCH]
vllm_plugin.register()
assert replaced() == before
print("same")
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {vllm_plugin.SWITCH: "1", "VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", script, str(tiny_policy())]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0 and ended.stdout.endswith("same\n"), ended.stdout + ended.stderr
    return ended


@pytest.mark.slow("real vLLM")
@pytest.mark.usefixtures("needs_vllm")
def test_answers_are_those_of_vllm_itself() -> None:
    run(SAME)


@pytest.mark.slow("real vLLM")
@pytest.mark.usefixtures("needs_vllm")
def test_json_of_either_grammar_backend_has_no_blanks_that_are_free_to_repeat() -> None:
    run(BLANKS)


@pytest.mark.slow("real vLLM")
@pytest.mark.usefixtures("needs_vllm")
def test_another_version_is_left_as_it_is_and_the_log_says_so_and_so_is_a_vllm_that_is_not_ours() -> None:
    ended = run(UNTOUCHED)
    assert ended.stderr.count("runs without Offbook's plugin, which supports 9.9 only") == 1
    assert "Offbook's plugin renders" not in ended.stderr


def test_vllm_finds_it_by_its_entry_point() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "offbook")
    assert found.load() is vllm_plugin.register
