"""When streams come in blocks of tokens: under load, from engines and bases with which nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from offbook.base.server_options import EngineOptions
from offbook.server.base_model import BaseModelPath, find
from offbook.server.calls.chat_exchange import BUSY_CALLS, STREAM_BLOCK_TOKENS
from offbook.server.sampler.engine_choice import choose
from offbook.server.sampler.transport import Quirks
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedCompletion


async def test_streams_are_asked_for_in_blocks_once_several_calls_are_in_flight(gateway: Gateway) -> None:
    opened, sampler = asyncio.Event(), gateway.sampler
    sampler.completions.extend(ScriptedCompletion(gates={0: opened}) for _ in range(BUSY_CALLS))
    object.__setattr__(gateway.services.engine, "quirks", Quirks(stream_blocks=True))
    waiting: list[asyncio.Task[httpx.Response]] = []
    for _ in range(BUSY_CALLS):
        waiting.append(asyncio.create_task(gateway.chat(stream=True)))
        await asyncio.wait_for(sampler.arrived.acquire(), 20)
    assert (await gateway.chat(stream=True)).status_code == 200
    opened.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert (await gateway.chat(stream=True)).status_code == 200
    asked = [body.get("stream_interval") for body in sampler.received]
    assert asked == [None] * BUSY_CALLS + [STREAM_BLOCK_TOKENS, None]


def test_only_bases_without_thoughts_are_streamed_in_blocks(tmp_path: Path) -> None:
    running = choose(EngineOptions.parse(vllm_url=["http://127.0.0.1:1"]), "tiny", trains=True)
    assert running.for_base(plain_answers=True).quirks.stream_blocks
    assert not running.for_base(plain_answers=False).quirks.stream_blocks
    embedded = choose(EngineOptions.parse(engine="embedded", device="cpu"), "tiny", trains=True)
    assert not embedded.for_base(plain_answers=True).quirks.stream_blocks
    assert find("tiny").answers_plainly() and not find("tiny-mcp").answers_plainly()


def test_a_reasoning_parser_of_the_user_s_keeps_streams_token_by_token() -> None:
    def blocks(**options: object) -> bool:
        found = choose(EngineOptions.parse(engine="vllm", device="cpu", **options), "tiny", trains=True)
        return found.for_base(plain_answers=True).quirks.stream_blocks

    assert blocks() and not blocks(reasoning_parser="ernie45")


@pytest.mark.parametrize(
    "files, plain",
    [
        ({"tokenizer_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": '{"chat_template": "<think>"}'}, False),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "a", "template": "[THINK]"}]}'}, False),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"}, True),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "<|channel|>analysis"}, False),
        ({"chat_template.jinja": "{{ messages }}"}, False),
        ({"tokenizer_config.json": "[", "chat_template.jinja": "{{ messages }}"}, False),
    ],
)
def test_a_base_answers_plainly_if_its_templates_are_known_and_mention_no_thoughts(
    files: dict[str, str], plain: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert BaseModelPath("base", tmp_path, "base").answers_plainly() is plain
