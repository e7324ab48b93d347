"""Ten events of a campaign: every part is hurt once or more, and no promise is broken."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import pytest

from offbook.server.maintenance import verify
from tests.power_loss.writers import write_files

from .__main__ import run, table
from .campaign import DECK, decks
from .damage import damage
from .promises import Promises


@pytest.mark.slow("a campaign of kills")
def test_ten_kills_lose_nothing_that_was_answered_and_apply_no_step_twice(tmp_path: Path) -> None:
    outcomes = run(tmp_path / "campaign", kills=10, seed=0)
    assert [outcome.broken for outcome in outcomes] == [[]] * 11
    assert {outcome.part.partition(":")[0] for outcome in outcomes} == {*DECK, "the end"}
    assert all(outcome.calls > 0 for outcome in outcomes[:-1])
    assert "| **all** | 11 |" in table(outcomes, "a command")


def test_what_the_campaign_damages_is_named_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_files(whole, lambda _: None)
    (whole / "project").rename(whole / "default")
    for seed in range(24):
        part = ("checkpoint", "checkpoint", "state", "facts")[seed % 4]
        folder = Path(shutil.copytree(whole, tmp_path / str(seed)))
        assert verify(folder, repair=False, own_records=False) == 0
        done = damage(folder, part, random.Random(seed))
        assert done is not None
        capsys.readouterr()
        assert verify(folder, repair=False, own_records=False) == 1, done
        assert done.named in capsys.readouterr().out, done


def test_each_ten_events_hurt_every_part_in_an_order_of_their_seed() -> None:
    assert sorted(decks(20, random.Random(1))) == sorted(DECK * 2)
    assert decks(20, random.Random(1)) == decks(20, random.Random(1)) != decks(20, random.Random(2))


async def test_a_promise_that_is_not_kept_is_told(tmp_path: Path) -> None:
    """What the campaign looks for is what it finds."""
    import sqlite3

    from offbook.server.records.store import Store

    await (await Store.open(f"sqlite:///{tmp_path / 'records.db'}")).close()
    with sqlite3.connect(tmp_path / "records.db") as records:
        columns = "id, trajectory_id, model, step, status, late, started_at, ended_at, prompt_ids, body"
        records.execute(f"INSERT INTO calls ({columns}) VALUES ('c', 't', 'm', 0, 'complete', 0, 1, 2, x'', '{{}}')")
        row = ("c", 0, "complete", "stop", struct.pack("<2i", 7, 8), b"", "{}")
        names = "call_id, choice, status, finish_reason, token_ids, logprobs, message"
        records.execute(f"INSERT INTO outputs ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    records.close()
    journal = tmp_path / "journal"
    lines = [
        '{"kind": "call", "id": "c", "trajectory": "t", "tokens": [7, 8]}',
        '{"kind": "call", "id": "d", "trajectory": "t", "tokens": [7]}',
        '{"kind": "finished", "id": "t", "reward": 1.0, "calls": 1}',
        '{"kind": "trained", "id": "r", "step": 1, "applied": true}',
        '{"kind": "trained", "id": "r", "step": 2, "applied": true}',
        '{"kind": "state", "name": "m", "count": 3}',
        '{"kind": "call", "id": "half a li',
    ]
    journal.write_text("\n".join(lines))
    promises = Promises(tmp_path)
    promises.read([journal])
    told = "\n".join(promises.broken())
    for words in (
        "two answers for one request",
        "d of t was answered and is not in the records",
        "t was finished with reward 1.0, the records say None",
        "t was finished with 1 calls, 2 were answered",
        "the result of r was told",
        "the state of m was written 3 times",
    ):
        assert words in told
    assert "c of t" not in told and len(told.splitlines()) == 6
