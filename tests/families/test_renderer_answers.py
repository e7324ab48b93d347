"""What is trained of a conversation, compared with `renderers`, which writes its families' templates by hand and marks what the
model would sample. `make_renderer_answers.py` wrote its answers."""

from __future__ import annotations

import json

import pytest

from offbook.base.types import RenderedHistory
from offbook.engine.chat_template import ChatTemplate
from offbook.engine.learner.targets.render import render_history
from offbook.engine.token_tree import build_tree, numbered
from tests.families.builders import Family
from tests.families.make_renderer_answers import AGAIN, ANSWER, ANSWERS, ASK, CONVERSATIONS, TOOL, call, result
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_token_outside_the_turns_of_the_assistant_is_a_target(family: Family) -> None:
    """All turns of a conversation in one step, as the learner lays it out: the targets are what the assistant wrote and the
    end of its turn. Tokens that turns share are computed once."""
    tokenizer = TOKENIZERS[family.name]
    ends = frozenset(tokenizer.get_vocab()[end] for end in family.ends)
    looked_up = [call(1, "4821"), result(1, "at Kiel")] if family.shows_tools else []
    messages = [ASK, *looked_up, ANSWER, AGAIN, {"role": "assistant", "content": "Since Monday."}]
    targets = tuple(place for place, message in enumerate(messages) if message["role"] == "assistant")
    tools = (TOOL,) if family.shows_tools else None
    history = RenderedHistory(messages=tuple(messages), tools=tools, targets=targets)
    samples = numbered(render_history(ChatTemplate(tokenizer), ends, history, "t", 0))
    tree = build_tree(samples)
    trained = tree.token_ids[tree.target_node][tree.target_number.argsort()]
    text = str(tokenizer.decode(trained.tolist()))
    last = str(tokenizer.decode(samples[-1].completion_ids[:-1].tolist()))
    assert last.split("</think>")[-1].strip() == "Since Monday."  # no header, and what a template opens for a thought
    assert text.count("On its way.") == text.count("Since Monday.") == 1
    assert not any(other in text for other in ("Where is", "And order", "5913", "Find an order", "at Kiel"))
    assert ("find_order" in text and "4821" in text) == family.shows_tools
    assert all(int(sample.completion_ids[-1]) in ends for sample in samples)
    assert sum(int(token) in ends for token in trained) == len(targets)
    assert len(tree) < sum(sample.length for sample in samples)
