"""A family's tool calls: what its template writes, vLLM's parser of its folder reads. The template that is written here is
held to Mistral's tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.families.builders import LLAMA3, MISTRAL, QWEN2_5, QWEN3, QWEN3_5, build, make_tokenizer
from tests.families.tool_calls import ARGUMENTS, ASKED, SAID, TOOL
from tests.paths import ROOT

ENGINES = "pip install -r requirements/engines.txt, then --no-deps -r requirements/engines-nodeps.txt"


@pytest.mark.slow("real vLLM")
def test_vllms_parser_of_each_family_reads_the_call_that_its_template_writes(
    tmp_path: Path, require: Callable[[bool, str], None]
) -> None:
    require(find_spec("vllm") is not None, ENGINES)
    folders = [str(build(family, tmp_path / family.name)) for family in (QWEN2_5, QWEN3, LLAMA3, MISTRAL, QWEN3_5)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.families.tool_call_readers", *folders],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert {name: found["calls"] for name, found in read.items()} == {
        folder: [["find_order", ARGUMENTS]] for folder in folders
    }


@pytest.mark.parametrize(
    "messages",
    [
        ASKED,
        [{"role": "system", "content": "Be short."}, *ASKED],
        [*ASKED, {"role": "assistant", "content": "On its way."}, {"role": "user", "content": "And 5913?"}],
        [
            {"role": "system", "content": "Be short."},
            *ASKED,
            SAID,
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
        ],
    ],
    ids=["asked", "system", "two turns", "tool result"],
)
def test_the_template_for_mistral_writes_what_mistrals_own_tokenizer_does(
    messages: list[dict[str, Any]], require: Callable[[bool, str], None]
) -> None:
    require(find_spec("mistral_common") is not None, ENGINES)
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    some: tuple[Any, ...] = (None, [TOOL])
    for tools in some:
        own = MistralTokenizer.v3().encode_chat_completion(ChatCompletionRequest.from_openai(messages, tools=tools))
        text = make_tokenizer(MISTRAL).apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == str(own.text).replace("\u2581", " ").replace("<0x0A>", "\n")
