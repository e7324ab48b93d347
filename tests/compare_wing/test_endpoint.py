"""The endpoint that lets other LLMs answer: its bytes as recorded, strangers, and mutated requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from offbook.base.errors import LlmError
from offbook.base.wire import TRAJECTORY_HEADER
from offbook.llms import Llm
from offbook.llms.provider import ChatAnswer, Tokens
from offbook.testing import fails, filters, scripted_llm
from offbook_compare.gateway import PATH, Gateway
from tests.http_listener.test_all_listeners import (  # the attacks, on the listener below  # noqa: F401
    short_limits,
    test_a_client_that_disconnects_within_its_body_is_at_most_one_line_of_the_log,
    test_a_web_page_runs_nothing,
    test_idle_connections_end_and_hold_no_threads,
    test_sizes_are_bounded,
    test_without_a_key_another_host_and_with_one_a_stranger_is_rejected_before_the_body,
)
from tests.http_listener.test_routes_fuzzed import CASES, CHAT, attack
from tests.openai_dialect.recordings import HELLO, USAGE, check, responses, told
from tests.openai_dialect.test_recorded_bytes import LLM_CASES, opened, replies


@pytest.fixture
def listener(short_limits: None) -> Iterator[tuple[int, str | None]]:  # noqa: F811
    """The port of the endpoint, and its key."""
    with Gateway({"big": Llm("openai/big", cache=None)}) as gateway:
        model = gateway.model("big")
        yield httpx.URL(model.inference_base_url).port or 0, model.inference_api_key


async def test_the_endpoint_of_a_comparison() -> None:
    script = replies() | {"filtered": filters(), "provider fails": fails(401, "wrong key")}
    ask = {"model": "big", "messages": HELLO}
    texts: list[str] = []
    with scripted_llm(list(script.values())) as api:
        llm = Llm(
            "openai/big",
            api_base=api.url,
            cache=None,
            retries=1,
            timeout=20.0,
            prices={"prompt": 2.0, "completion": 8.0},
        )
        with Gateway({"big": llm}) as gateway:
            model = gateway.model("big")
            headers = {"authorization": f"Bearer {model.inference_api_key}", TRAJECTORY_HEADER: "t1"}
            async with opened(model.inference_base_url.removesuffix("/v1")) as http:
                for name in script:
                    fields = LLM_CASES.get(name, USAGE if "streamed" in name else {})
                    texts.append(await responses(http, {name: ask | fields}, headers))
                others: dict[str, Any] = {"after a lasting fault": ask, "another model": ask | {"model": "x"}}
                others |= {"no messages": {"model": "big"}, "no JSON": "{"}
                texts.append(await responses(http, others, headers))
                texts.append(await responses(http, {"without the key": ask}))
                elsewhere = await http.post("/v1/other", json={}, headers=headers)
                texts.append(told("no path", "{}", elsewhere))
    check("comparison", "".join(texts))


class Answering(Llm):
    """Another LLM that answers at once, or fails."""

    async def chat(self, messages: Any, *arguments: Any, **options: Any) -> ChatAnswer:
        if len(messages) % 2:
            message = {"role": "assistant", "content": "ok"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return ChatAnswer((choice,), Tokens(1, 1), None, 0.1)
        raise LlmError("refused", kind="refused")


async def test_no_request_to_a_comparisons_endpoint_is_answered_500() -> None:
    assert PATH.fullmatch("/t/t/v1/chat/completions")
    body = CHAT | {"model": "big", "temperature": 0.5, "top_p": 0.5, "tools": [{"type": "function"}], "stream": False}
    with Gateway({"big": Answering("openai/big", cache=None)}) as gateway:
        model = gateway.model("big")
        headers = {"authorization": f"Bearer {model.inference_api_key}"}
        url = str(model.inference_base_url).removesuffix("/v1")
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            paths = ("/v1/chat/completions", "/t/{trajectory_id}/v1/chat/completions")
            doors: list[tuple[str, str, Any]] = [("POST", path, body) for path in paths]
            assert await attack(http, doors, 10 * CASES) == 20 * CASES
