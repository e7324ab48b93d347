"""The server over the engine that it brings: what grammars, heavy bodies and questions about tokens come to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from offbook import tiny
from tests.server.servers import RunningServer

FREE_TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 3, "maxLength": 12}},
    "required": ["text"],
    "additionalProperties": False,
}
SAY = {"type": "function", "function": {"name": "say", "parameters": FREE_TEXT}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("embedded") / "dir", "--inference-only") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.path())


@pytest.mark.parametrize(
    ("shaped", "constrained"),
    [
        ({"tools": [SAY], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": FREE_TEXT}}}, "response_format"),
    ],
)
def test_a_shaped_answer_has_no_control_tokens_in_its_text_and_is_recorded_as_constrained(
    server: RunningServer, tokenizer: PreTrainedTokenizerBase, shaped: dict[str, Any], constrained: str
) -> None:
    name = f"shaped-by-{constrained}"
    answer = server.chat("Say a word", name, n=16, seed=1, temperature=9.0, max_tokens=100, **shaped)
    assert answer.status_code == 200, answer.text
    (call,) = server.http.get(f"/api/trajectories/{name}").json()["calls"]
    assert call["constrained"] == constrained
    vocabulary = tokenizer.get_vocab()
    ending, around = {vocabulary[str(tokenizer.eos_token)]}, {vocabulary["<tool_call>"], vocabulary["</tool_call>"]}
    assert len(call["outputs"]) == 16
    for output in call["outputs"]:
        marks = [token for token in output["token_ids"] if token in tokenizer.added_tokens_decoder]
        assert set(marks) <= (ending | around if constrained == "tool_choice" else ending)
        assert len(output["logprobs"]) == len(output["token_ids"]) and None not in output["logprobs"]
        if output["finish_reason"] == "tool_calls":
            for made in output["message"]["tool_calls"]:
                assert len(json.loads(made["function"]["arguments"])["text"]) >= 3
        elif output["finish_reason"] == "stop":
            assert len(json.loads(output["message"]["content"])["text"]) >= 3
    assert {"tool_calls", "stop"} & {output["finish_reason"] for output in call["outputs"]}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_schema_that_nothing_follows_is_the_requests_fault(server: RunningServer, streamed: bool) -> None:
    part: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    for schema, place in ({"$ref": "#"}, "at once"), (part | {"$defs": {"a": {"$ref": "#/$defs/a"}}}, "after a while"):
        shape = {"type": "json_schema", "json_schema": {"name": "none", "schema": schema}}
        answer = server.chat(trajectory="nothing", response_format=shape, max_tokens=400, stream=streamed)
        if streamed and place == "after a while":
            error = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == "response_format"
        assert "no JSON satisfies the schema" in error["message"]


# ---- heavy bodies


def many_tools(count: int) -> list[dict[str, Any]]:
    properties = {"place": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["place"]}
    return [
        {"type": "function", "function": {"name": f"tool_{at}", "description": "words " * 8, "parameters": parameters}}
        for at in range(count)
    ]


def many_properties(count: int) -> dict[str, Any]:
    properties = {f"p{at}": {"type": "string"} for at in range(count)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}


class Watch:
    """Asks for the health of server and engine all the while; `longest`: seconds that the slowest answer took."""

    def __init__(self, *clients: httpx.Client) -> None:
        self.longest = 0.0
        self.statuses: list[int] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in clients]

    def _ask(self, http: httpx.Client) -> None:
        with http:
            while not self._over.is_set():
                before = time.monotonic()
                self.statuses.append(http.get("/health").status_code)
                self.longest = max(self.longest, time.monotonic() - before)

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


def of_engine(server: RunningServer) -> httpx.Client:
    """A client on the Unix socket that the engine was given."""
    words = server.child("inference").cmdline()
    transport = httpx.HTTPTransport(uds=words[words.index("--uds") + 1])
    return httpx.Client(base_url="http://engine", transport=transport, timeout=60.0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text": "some words " * 1_800_000}, 400, "shorten the prompt"),
        ({"text": "x" * 20_000_000}, 400, "shorten the prompt"),
        ({"tools": many_tools(3000)}, 400, "shorten the prompt"),
        ({"tools": many_tools(3000), "tool_choice": "required"}, 400, "at most 500 tools (got 3000)"),
        ({"response_format": many_properties(5000)}, 200, ""),
        ({"response_format": many_properties(20_000)}, 400, "a grammar takes at most"),
    ],
)
def test_the_server_and_its_engine_say_how_they_are_while_a_heavy_body_is_handled(
    server: RunningServer, body: dict[str, Any], status: int, words: str
) -> None:
    engine = server.child("inference").pid
    of_server = httpx.Client(base_url=server.url, trust_env=False, timeout=60.0)
    watch = Watch(of_server, of_engine(server))
    with watch.asking():
        answer = server.chat(trajectory="heavy", **body)
    assert answer.status_code == status, answer.text[:500]
    assert words in answer.text[:500]
    assert len(watch.statuses) > 2 and set(watch.statuses) == {200}
    assert watch.longest < 10.0  # it was minutes; a busy machine takes a second
    assert server.child("inference").pid == engine
