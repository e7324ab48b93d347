"""What is trained of a conversation, compared with `renderers`, which writes its families' templates by hand and marks what the
model would sample. `make_renderer_answers.py` wrote its answers."""

from __future__ import annotations

import json

import pytest

from offbook.base.types import RenderedHistory
from offbook.engine.chat_template import ChatTemplate
from offbook.engine.learner.targets.render import render_history
from tests.families.make_renderer_answers import ANSWERS, CONVERSATIONS
from tests.families.prompt_cases import FAMILIES
from tests.families.test_prompts import TOKENIZERS

EXPECTED: dict[str, list[str]] = json.loads(ANSWERS.read_text(encoding="utf-8"))
OPENED = {"qwen3_5": "<think>\n"}
"""What the generation prompt of a family begins for the model, which `renderers` counts as sampled."""


def test_every_message_of_the_assistant_has_an_answer() -> None:
    targets = [
        message for messages, _ in CONVERSATIONS.values() for message in messages if message["role"] == "assistant"
    ]
    assert len(EXPECTED) == 3 * len(targets)


@pytest.mark.parametrize("case", EXPECTED)
def test_prompt_and_trained_span_are_those_of_renderers(case: str) -> None:
    name, title, target = (
        case.split(", ", 1)[0],
        case.split(", ", 1)[1].rsplit(", ", 1)[0],
        int(case.rsplit(", ", 1)[1]),
    )
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = TOKENIZERS[name]
    ends = frozenset(tokenizer.get_vocab()[end] for end in family.ends)
    messages, tools = CONVERSATIONS[title]
    history = RenderedHistory(
        messages=tuple(messages), tools=None if tools is None else tuple(tools), targets=(target,)
    )
    [sample] = render_history(ChatTemplate(tokenizer), ends, history, "t", 0)
    prompt, trained = (str(tokenizer.decode(ids.tolist())) for ids in (sample.prompt_ids, sample.completion_ids))
    before, sampled = EXPECTED[case]
    opened = OPENED.get(name, "")
    assert prompt == before + opened
    assert opened + trained == sampled
