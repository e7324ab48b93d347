"""`reasoning_effort`: the chat template's own variables, as in vLLM."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from offbook.engine.inference.chat.requests import ChatCompletionRequest, DialectError
from offbook.engine.inference.chat.template import ChatRenderer
from offbook.engine.inference.decoding.model import ModelRunner

EFFORT = "effort {{ reasoning_effort | default('unsaid') }}"
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}no thought{% else %}thought{% endif %}"


def rendered(policy: ModelRunner, template: str, **fields: Any) -> str:
    tokenizer = copy.copy(policy.tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}: " + template
    request = ChatCompletionRequest(model="base", messages=[{"role": "user", "content": "hi"}], **fields)
    return str(tokenizer.decode(list(ChatRenderer(tokenizer, 100).prompt_ids(request)))).removeprefix("hi: ")


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (EFFORT, {}, "effort unsaid"),
        (EFFORT, {"reasoning_effort": "high"}, "effort high"),
        (THINKING, {"reasoning_effort": "none"}, "no thought"),
        (THINKING, {"reasoning_effort": "low"}, "thought"),
        (THINKING, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "no thought"),
        (EFFORT + THINKING, {"reasoning_effort": "none"}, "effort noneno thought"),
    ],
)
def test_an_effort_is_what_the_template_makes_of_it(
    policy: ModelRunner, template: str, fields: dict[str, Any], text: str
) -> None:
    assert rendered(policy, template, **fields) == text


def test_an_effort_that_the_template_does_not_know_is_refused(policy: ModelRunner) -> None:
    with pytest.raises(DialectError, match="no variable for effort") as caught:
        rendered(policy, "", reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"
