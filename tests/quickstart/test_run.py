"""What the quickstart shows, on few requests. The whole of it is run from the wheel, in tests/packaging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbook import LocalBackend
from offbook.quickstart import run
from offbook.quickstart.run import Transcripts, conversation


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


def test_an_agent_is_evaluated_trained_and_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in {"TEST_REQUESTS": 10, "GROUP_SIZE": 4, "SCENARIOS_PER_STEP": 4}.items():
        monkeypatch.setattr(run, name, few)
    desk, results = tmp_path / "desk", tmp_path / "results.json"
    try:
        run.main(seed=3, steps=1, folder=desk, results=results)
    finally:
        LocalBackend(dir=desk / "server").close()
    told = json.loads(results.read_text())
    assert set(told["success"]) == set(told["sampled"]) == {"before", "after"}
    assert len(told["rewards"]) == 1
    assert (desk / "rewards.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    [lora] = [line.split(maxsplit=1)[1] for line in printed.splitlines() if line.startswith("LoRA")]
    assert (Path(lora) / "adapter_model.safetensors").exists()
    assert "of 10 held-out requests right" in printed and "offbook export order-desk-3" in printed
