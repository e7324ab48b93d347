"""Run as a program, since vLLM takes seconds to import: what vLLM with our plugin sends to the model of each folder given for
each case, as tokens by folder and case. An error is its text."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer

from offbook.engine.inference.vllm.plugin import wrap_render_messages
from tests.families.prompt_cases import CASES, TOOL

RENDER = wrap_render_messages(HfRenderer.render_messages_async)


async def prompt(renderer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int] | str:
    """As `OnlineRenderer.preprocess_chat` of vLLM 0.32 does it: validate, dump the tools, render, encode."""
    body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
    request = ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
    offered = [tool.model_dump() for tool in request.tools] if request.tools is not None else None
    params = request.build_chat_params(None, "auto").with_defaults({"tools": offered, "tokenize": False})
    try:
        _, rendered = await RENDER(renderer, request.messages, params)
    except VLLMValidationError as error:
        return str(error.args[0])
    if "prompt_token_ids" in rendered:
        return rendered["prompt_token_ids"]
    return renderer.get_tokenizer().encode(rendered["prompt"], add_special_tokens=False)


class Renderer:
    """What of vLLM's renderer the plugin uses."""

    model_config = None

    def __init__(self, folder: str, executor: ThreadPoolExecutor) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._executor = executor

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    async def _render_with_timeout(self, work: Awaitable[Any]) -> Any:
        return await work


async def prompts(folder: str, executor: ThreadPoolExecutor) -> dict[str, list[int] | str]:
    renderer = Renderer(folder, executor)
    return {
        f"{name}, {'tools' if tools else 'no tools'}": await prompt(renderer, messages, tools)
        for name, messages in CASES.items()
        for tools in (None, [TOOL])
    }


if __name__ == "__main__":
    with ThreadPoolExecutor(1) as threads:
        print(json.dumps({folder: asyncio.run(prompts(folder, threads)) for folder in sys.argv[1:]}))
