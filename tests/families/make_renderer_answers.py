"""Writes what `renderers` (PyPI, Apache-2.0) would train of conversations, by family and target, for test_renderer_answers.py.

Run it in an environment of its own with `pip install renderers==0.1.12 tokenizers`, in two steps: with the project's Python
`python -m tests.families.make_renderer_answers tokenizers FOLDER`, then with the other `python make_renderer_answers.py answers FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "renderer_answers.json"
FAMILIES = ("llama3", "qwen3", "qwen3_5")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
    },
}


def call(place: int, order: str, content: str = "") -> dict[str, Any]:
    """A message that calls the tool."""
    function = {"name": "find_order", "arguments": {"id": order}}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"call{place:05}", "type": "function", "function": function}],
    }


def result(place: int, text: str) -> dict[str, Any]:
    """A tool's result."""
    return {"role": "tool", "content": text, "tool_call_id": f"call{place:05}", "name": "find_order"}


SYSTEM = {"role": "system", "content": "Be brief."}
ASK, AGAIN = ({"role": "user", "content": text} for text in ("Where is order 4821?", "And order 5913?"))
ANSWER = {"role": "assistant", "content": "On its way."}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([ASK, ANSWER], None),
    "several turns": (
        [SYSTEM, ASK, ANSWER, AGAIN, {"role": "assistant", "content": "At Kiel.\n\nSince Monday."}],
        None,
    ),
    "tools": ([SYSTEM, ASK, call(1, "4821"), result(1, "at Kiel"), ANSWER, AGAIN, call(2, "5913")], [TOOL]),
    "tools offered, none called": ([SYSTEM, ASK, ANSWER], [TOOL]),
}


def write_tokenizers(folder: Path) -> None:
    """The families' tokenizers, and their end and start tokens, for the other environment."""
    from tests.families.test_prompts import TOKENIZERS

    for name in FAMILIES:
        tokenizer = TOKENIZERS[name]
        tokenizer.backend_tokenizer.save(str(folder / f"{name}.json"))
        note = {"eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
        (folder / f"{name}.note").write_text(json.dumps(note))


class Tokenizer:
    """What `renderers` needs of a tokenizer."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(folder / f"{name}.json"))
        note = json.loads((folder / f"{name}.note").read_text())
        self.name_or_path, self.unk_token_id = name, None
        self.eos_token_id, self.bos_token_id = note["eos"], note["bos"]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        if token.startswith("<|vision") or token.endswith("_pad|>"):
            return 1_000_000  # of pictures, which these conversations have not
        return self._fast.token_to_id(token)


def write_answers(folder: Path) -> None:
    """Per family and conversation: for each message of the assistant, the text before it and the text that is trained."""
    from renderers import create_renderer  # pyright: ignore[reportMissingImports]  # see the module's docstring
    from renderers.configs import (  # pyright: ignore[reportMissingImports]
        Llama3RendererConfig,
        Qwen3RendererConfig,
        Qwen35RendererConfig,
    )

    configs = {"llama3": Llama3RendererConfig, "qwen3": Qwen3RendererConfig, "qwen3_5": Qwen35RendererConfig}
    answers: dict[str, Any] = {}
    for name, config in configs.items():
        tokenizer = Tokenizer(name, folder)
        renderer = create_renderer(tokenizer, config())
        for title, (messages, tools) in CONVERSATIONS.items():
            for target, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                whole = renderer.render(messages[: target + 1], tools=tools)
                trained = [
                    place
                    for place, (owner, sampled) in enumerate(
                        zip(whole.message_indices, whole.sampled_mask, strict=True)
                    )
                    if owner == target and sampled
                ]
                assert trained == list(range(trained[0], trained[-1] + 1))
                answers[f"{name}, {title}, {target}"] = [
                    tokenizer.decode(whole.token_ids[: trained[0]]),
                    tokenizer.decode(whole.token_ids[trained[0] : trained[-1] + 1]),
                ]
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    {"tokenizers": write_tokenizers, "answers": write_answers}[sys.argv[1]](Path(sys.argv[2]))
