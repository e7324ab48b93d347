"""Thoughts are told from answers, whole or in pieces, by the text and by the prompt."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from offbook import tiny
from offbook.engine.inference.chat.answers import AnswerWriter
from offbook.engine.inference.chat.families import thinks
from offbook.engine.inference.chat.requests import ChatCompletionRequest
from offbook.engine.inference.chat.thoughts import ThoughtSplitter
from offbook.engine.inference.decoding.generation import Decoder, Update
from policies.tokenizer import ids_of

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def split(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    """The thought and the answer of a text that comes in pieces."""
    splitter = ThoughtSplitter(inside=inside)
    found = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nwell\nso\n</think>\n\nYes.\n", False, ("well\nso", "Yes.\n")),
        ("<think>a</think><tool_call>", False, ("a", "<tool_call>")),
        ("\n <think>a</think>b", False, ("a", "b")),
        ("Yes. <think>a</think>", False, ("", "Yes. <think>a</think>")),
        ("  <thin", False, ("", "  <thin")),
        ("\n", False, ("", "\n")),
        ("", False, ("", "")),
        ("well</think>\n\nYes.", True, ("well", "Yes.")),
        ("well, it", True, ("well, it", "")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("<think>a</thin\n", False, ("a</thin", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_splitting(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside) == expected
    assert split(list(text), inside) == expected


@given(st.text(alphabet="a<\n>/think ", max_size=40), st.booleans(), st.booleans(), st.data())
def test_pieces_do_not_matter(text: str, opened: bool, inside: bool, data: st.DataObject) -> None:
    text = ("<think>" if opened else "") + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, inside) == split([text], inside)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("tiny-mcp"))
    return tokenizer


def answers(tokenizer: Any, text: str, prompt: str = "", **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message of the whole answer with this text, and the deltas of the same as a stream, joined."""
    ids = (*ids_of(tokenizer, text), cast(int, tokenizer.eos_token_id))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]} | fields
    request = ChatCompletionRequest.model_validate(body)
    prompt_ids = tuple(ids_of(tokenizer, prompt))
    decoder = Decoder(tokenizer, kept=("<tool_call>", "</tool_call>"))
    zeros = (0.0,) * len(ids)
    whole = AnswerWriter(request, prompt_ids, decoder, thinks=True).whole([Update(ids, zeros, finish="stop")])
    streamed = ChatCompletionRequest.model_validate(body | {"stream": True})
    writer = AnswerWriter(streamed, prompt_ids, decoder, thinks=True)
    updates = [Update((token,), (0.0,)) for token in ids[:-1]] + [Update(ids[-1:], (0.0,), finish="stop")]
    joined: dict[str, Any] = {}
    for update in updates:
        for name, value in writer.chunk(0, update)["choices"][0]["delta"].items():
            joined[name] = joined.get(name, type(value)()) + value
    return whole["choices"][0]["message"], joined


def test_the_line_before_a_call_is_reasoning(tokenizer: Any) -> None:
    message, streamed = answers(tokenizer, f"<think>look<1>()</think>{CALL}")
    assert (message["content"], message["reasoning"]) == (None, "look<1>()")
    assert message["tool_calls"][0]["function"]["name"] == "look"
    assert streamed["reasoning"] == "look<1>()" and "content" not in streamed
    assert [call["function"]["name"] for call in streamed["tool_calls"]] == ["look"]


def test_a_call_that_is_only_thought_of_is_none(tokenizer: Any) -> None:
    message, streamed = answers(tokenizer, f"<think>maybe {CALL}</think>No.")
    assert "tool_calls" not in message and message["content"] == "No." == streamed["content"]
    assert "tool_calls" not in streamed


def test_a_thought_that_the_prompt_opened(tokenizer: Any) -> None:
    message, streamed = answers(tokenizer, "so\n</think>\n\nYes.", prompt="<|im_start|>assistant\n<think>\n")
    assert (message["reasoning"], message["content"]) == ("so", "Yes.") == (streamed["reasoning"], streamed["content"])
    closed, _ = answers(tokenizer, "Yes.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert closed == {"role": "assistant", "content": "Yes."}


def test_a_thought_without_an_end(tokenizer: Any) -> None:
    message, streamed = answers(tokenizer, "<think>well, it")
    assert message == {"role": "assistant", "content": None, "reasoning": "well, it"}
    assert streamed == {"reasoning": "well, it"}


def test_reasoning_that_is_not_wanted(tokenizer: Any) -> None:
    message, streamed = answers(tokenizer, "<think>a</think>Yes.", include_reasoning=False)
    assert message == {"role": "assistant", "content": "Yes."} and streamed == {"content": "Yes."}


def test_a_shaped_answer_is_no_thought(tokenizer: Any) -> None:
    shaped = {"response_format": {"type": "json_object"}, "tools": None}
    message, _ = answers(tokenizer, '{"a": 1}', prompt="<think>\n", **shaped)
    assert message["content"] == '{"a": 1}'


def test_a_model_thinks_when_its_template_does(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not thinks(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ '<think>' }}")
    assert thinks(tmp_path)
