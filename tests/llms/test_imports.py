"""Importing the seam costs nothing; its options are checked before anything is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import offbook.llms
from offbook.base.errors import ConfigError, install_command
from offbook.llms import Llm


def in_fresh_process(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_importing_it_loads_no_client_and_writes_no_variable() -> None:
    loaded, llm_loaded, variables = in_fresh_process(
        "import sys, os, json; before, env = set(sys.modules), dict(os.environ); import offbook.llms; "
        "loaded = sorted(set(sys.modules) - before); from offbook.llms import *; Llm('openai/o3'); "
        "print(json.dumps([loaded, sorted(sys.modules), sorted(set(os.environ) ^ set(env))]))"
    )
    assert not {"torch", "sqlalchemy", "httpx"} & set(loaded)
    assert not {"litellm", "openai"} & {name.split(".")[0] for name in llm_loaded}
    assert variables == []


def test_the_first_question_needs_the_extra_and_says_so() -> None:
    code = """
import asyncio, json, sys
sys.modules["litellm"] = None
from offbook.llms import Llm
try:
    asyncio.run(Llm("openai/o3", cache=None).ask_text([{"role": "user", "content": "hello"}]))
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert in_fresh_process(code) == f"litellm is not installed: {install_command('judge')}"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_loading_litellm_reads_no_dotenv_and_fetches_nothing(tmp_path: Any) -> None:
    (tmp_path / ".env").write_text("CANARY_OF_A_DOTENV=1\n")
    code = f"""
import os, json, socket, sys, logging
os.chdir({str(tmp_path)!r})
asked = []
socket.getaddrinfo = lambda *args, **options: asked.append(args) or []
from offbook.llms.provider import load
litellm = load()
print(json.dumps(["CANARY_OF_A_DOTENV" in os.environ, asked, litellm.suppress_debug_info, logging.getLogger("LiteLLM").level]))
"""
    assert in_fresh_process(code) == [False, [], True, 40]


def test_its_names_are_exact_and_each_can_be_loaded() -> None:
    names = offbook.llms.__all__
    assert names == sorted(names)
    assert all(getattr(offbook.llms, name) is not None for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, r"LlmOptions\.timeout: .*greater than 0 \(got 0\)"),
        ({"prices": {"prompt": 1}}, r"LlmOptions\.prices\.completion: Field required"),
        ({"time_out": 3}, "no option 'time_out': did you mean 'timeout'"),
        ({"concurency": 3}, "did you mean 'concurrency'"),
        ({"num_retries": 3}, "no option 'num_retries': use retries="),
        ({"response_format": {}}, r"use ask\(messages, schema\)"),
        ({"base_url": "http://x"}, "use api_base="),
        ({"stream": True}, "answers are read whole"),
        ({"max_cost": 5}, r"llms\.budget\(max_cost\)"),
        ({"tools": object()}, "must be JSON values"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Llm("openai/o3", **options)


def test_an_llm_is_a_value() -> None:
    one, same = (Llm("openai/o3", temperature=0.5, top_p=1, api_key="a-secret-key") for _ in range(2))
    assert (one == same, hash(one) == hash(same), one == Llm("openai/o3")) == (True, True, False)
    assert (repr(one), "a-secret-key" in repr(one.options)) == ("Llm('openai/o3')", False)
    one.options.litellm_parameters["temperature"] = 1
    assert one.options.litellm_parameters["temperature"] == 0.5
