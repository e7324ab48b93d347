"""`offbook sft`: a dry run that changes nothing, a training, and the same command again."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import pytest

import offbook
from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.types import RenderedHistory, new_id
from offbook.commands.main import run
from offbook.engine import protocol
from offbook.engine.learner.dry_run import measure
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import DryRun, DryRunReport
from offbook.tiny import path
from tests.paths import ROOT

ASK = {"role": "user", "content": "how much was order 4821?"}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def history(*texts: str, turns: tuple[int, ...] = (1,)) -> RenderedHistory:
    messages = [message for text in texts for message in (ASK, say(text))]
    return RenderedHistory(messages=tuple(messages), targets=turns, source=f"data.jsonl, line {len(texts)}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"messages": [ASK, say(f"{price}.50")], "id": price} for price in range(10, 18)]
    rows.append({"messages": [ASK, say("It was sk-" + "a1" * 12)]})
    file = tmp_path / "orders.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows), '{"messages": ']) + "\n")
    return file


def test_a_dry_run_counts_what_the_learner_would_render_and_times_an_update() -> None:
    policy = Policy.load(path(), LoraOptions(), threads=1)
    config = TrainConfig(loss="cross_entropy")
    long = history("word " * 4_000)
    run_of = (history("10.50"), history("11.50", "12.50", turns=(1, 3)), long)
    report = measure(policy, DryRun(histories=run_of, config=config, batch_size=2))
    rendered = [policy.chat_template.encode(f"{price}<|im_end|>") for price in ("10.50", "11.50", "12.50")]
    assert (report.examples, report.messages, len(report.skipped)) == (2, 3, 1)
    assert report.skipped[0].startswith("data.jsonl, line 1: message 1 ends at token")
    assert report.trained == report.measured == sum(map(len, rendered))
    assert report.longest < report.tokens
    assert report.seconds > 0
    last = measure(
        policy, DryRun(histories=run_of[:2], config=config.model_copy(update={"turns": "last"}), batch_size=1)
    )
    assert (last.messages, last.measured) == (2, len(rendered[0]))


def test_a_dry_run_prints_what_would_be_done(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[DryRun] = []

    def dry_run(base: str, run: DryRun) -> DryRunReport:
        asked.append(run)
        return DryRunReport(examples=9, messages=9, trained=100, tokens=400, longest=50, measured=50, seconds=2.0)

    monkeypatch.setattr("offbook.commands.sft.dry_run", dry_run)
    assert run([*shlex.split(f"sft {data} --base tiny --dry-run")]) == 2
    assert "orders.jsonl, line 10: not JSON" in capsys.readouterr().err
    words = f"sft {data} --base tiny --dry-run --skip-bad --held-out 0.2 --epochs 3 --batch-size 4 --turns last"
    assert run(shlex.split(words)) == 0
    assert (len(asked[0].histories), asked[0].config.turns, asked[0].batch_size) == (9, "last", 4)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == [
        "orders.jsonl: 9 conversations, 9 messages to train",
        "tokens    100 trained of 400 read; the longest row has 50",
        "held out  about 2 conversations",
        "left out  1 row and 0 messages that cannot be trained",
    ]
    assert shown[5:] == [
        "masked    secrets in 1 text",
        "unread    fields that no conversation has: id",
        "time      an update of 4 conversations took 2 s here: about 12 s for 6 batches in 3 epochs, without the start",
    ]


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


def test_the_module_of_a_dry_run_exists() -> None:
    assert (ROOT / "src" / f"{protocol.DRY_RUN_MODULE.replace('.', '/')}.py").is_file()
