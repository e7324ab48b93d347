"""Run as a program, since vLLM takes seconds to import: what vLLM's parser of each folder given reads from the call that the
folder's own chat template writes, as JSON by folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from offbook.engine.inference.chat.families import parsers
from tests.families.tool_calls import ASKED, SAID, TOOL


def written(tokenizer: Any) -> str:
    """The assistant's turn as the template writes it, from where the model takes over."""
    prompt = tokenizer.apply_chat_template(ASKED, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*ASKED, SAID], tools=[TOOL], tokenize=False)
    return whole.removeprefix(prompt).removesuffix("\n").removesuffix(tokenizer.eos_token)


def read(folder: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parser = ToolParserManager.get_tool_parser(parsers(folder).tool_call)(tokenizer, None)  # type: ignore[arg-type]  # each family here has a parser
    request = ChatCompletionRequest(model="any", messages=ASKED, tools=[TOOL])  # type: ignore[call-arg]  # it has defaults
    found = parser.extract_tool_calls(written(tokenizer), request)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    return {"text": written(tokenizer), "calls": calls}


if __name__ == "__main__":
    print(json.dumps({name: read(Path(name)) for name in sys.argv[1:]}))
