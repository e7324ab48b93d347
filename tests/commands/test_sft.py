"""`offbook sft`: a training, and the same command again."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest

import offbook
from offbook.base.types import new_id
from offbook.commands.main import run

ASK = {"role": "user", "content": "how much was order 4821?"}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"messages": [ASK, say(f"{price}.50")], "id": price} for price in range(10, 18)]
    rows.append({"messages": [ASK, say("It was sk-" + "a1" * 12)]})
    file = tmp_path / "orders.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), '{"messages": ']) + "\n")
    return file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sft none.jsonl --base tiny", "none.jsonl cannot be read: No such file"),
        ("sft none.jsonl", "Missing option '--base-model'"),
        ("sft none.jsonl --base tiny --epochs 0", "Invalid value for '--epochs'"),
        ("sft none.jsonl --base tiny --patience 2", "give a held_out share"),
    ],
)
def test_bad_input_is_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_URL", "http://127.0.0.1:9")
    assert run(shlex.split(words)) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow("more real servers")
def test_a_file_is_trained_once_by_the_same_command(
    data: Path,
    local_backend: offbook.LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api = asyncio.run(local_backend.connect("tiny"))
    monkeypatch.setenv("OFFBOOK_URL", api.url)
    monkeypatch.setenv("OFFBOOK_API_KEY", api.key or "")
    name = new_id("sft")
    words = f"sft {data} --base tiny --model {name} --skip-bad --held-out 0.2 --epochs 2 --batch-size 4 --learning-rate 3e-3"
    assert run(shlex.split(words)) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == f"{name}, step 4: 4 batches of 7 examples"
    assert [line.split()[0] for line in first[1:]] == ["loss", "held", "left", "masked"]
    assert run(shlex.split(words)) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [f"{first[0]} (4 of them by an earlier run)", *first[1:]]
