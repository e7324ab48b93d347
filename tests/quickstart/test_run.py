"""The quickstart end to end, one step, and again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from understudy.quickstart.story import Transcripts, conversation


def quickstart(folder: Path, steps: int) -> subprocess.CompletedProcess[str]:
    words = ["quickstart", "--steps", str(steps), "--seed", "3", "--json", "results.json", "--dir", "desk"]
    code = "import sys; from understudy.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )


def test_one_step_and_then_a_second_run_that_goes_on(tmp_path: Path) -> None:
    first = quickstart(tmp_path, 1)
    assert first.returncode == 0, first.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["seed"] == 3
    assert set(results["success"]) == set(results["sampled"]) == {"before", "after"}
    assert 0 <= results["success"]["before"] <= 1
    assert len(results["rewards"]) == len(results["seconds"]["rollout"]) == len(results["seconds"]["train"]) == 1
    assert (tmp_path / "desk" / "rewards.png").read_bytes().startswith(b"\x89PNG")
    [lora] = [line.split(maxsplit=1)[1] for line in first.stdout.splitlines() if line.startswith("LoRA")]
    assert (Path(lora) / "adapter_model.safetensors").exists()
    assert "understudy export order-desk-3" in first.stdout

    again = quickstart(tmp_path, 1)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to train" in again.stdout
    assert json.loads((tmp_path / "results.json").read_text())["success"]["before"] == results["success"]["before"]


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
