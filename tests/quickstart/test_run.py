"""What the quickstart shows. The whole of it is run from the wheel, in tests/packaging."""

from __future__ import annotations

from understudy.quickstart.story import Transcripts, conversation


def test_a_conversation_reads_like_one() -> None:
    call = {"id": "1", "function": {"name": "order_status", "arguments": '{"order": "4821"}'}}
    broken = {"id": "2", "function": {"name": "order_status", "arguments": "{order"}}
    messages = [
        {"role": "user", "content": "has order 4821 left yet?"},
        {"role": "assistant", "content": "", "tool_calls": [call, broken]},
        {"role": "tool", "content": '{"status": "lost"}'},
        {"role": "assistant", "content": "The answer is lost."},
    ]
    assert conversation(messages).splitlines() == [
        "  you    has order 4821 left yet?",
        "  agent  calls order_status(order='4821')",
        "  agent  calls order_status(='{order')",
        '  tool   {"status": "lost"}',
        "  agent  The answer is lost.",
    ]


def test_without_evaluations_there_is_no_story() -> None:
    assert Transcripts().learned() is None
