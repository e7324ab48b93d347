"""Three events of a campaign, each to another part, and no promise is broken."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from offbook.base.server_sent_events import EventReader
from offbook.base.wire import TRAJECTORY_HEADER
from offbook.server.maintenance import verify
from offbook.server.records.store import Store, create_file
from offbook.testing import Action, scripted_server
from tests.power_loss.writers import write_files

from .__main__ import run, table
from .calls import DOORS, Wish
from .campaign import DECK, decks
from .damage import damage
from .promises import Promises


@pytest.mark.slow("a campaign of kills")
def test_kills_lose_nothing_that_was_answered_and_apply_no_step_twice(tmp_path: Path) -> None:
    outcomes = run(tmp_path / "campaign", kills=3, seed=110)
    assert [outcome.broken for outcome in outcomes] == [[]] * 4
    parts = {"server", "sft", "disk full", "the end"}
    assert {outcome.part.partition(":")[0] for outcome in outcomes} == parts
    assert all(outcome.calls > 0 for outcome in outcomes[:-1])
    assert "| **all** | 4 |" in table(outcomes, "a command")


def test_what_the_campaign_damages_is_named_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_files(whole, lambda _: None)
    (whole / "project").rename(whole / "default")
    create_file(whole / "records.db")
    for seed in range(24):
        part = ("checkpoint", "missing file", "state", "facts")[seed % 4]
        folder = Path(shutil.copytree(whole, tmp_path / str(seed)))
        assert verify(folder, repair=False) == 0
        done = damage(folder, part, random.Random(seed))
        assert done is not None
        capsys.readouterr()
        assert verify(folder, repair=False) == 1, done
        assert done.named in capsys.readouterr().out, done


def test_each_fourteen_events_hurt_every_part_in_an_order_of_their_seed() -> None:
    assert sorted(decks(28, random.Random(1))) == sorted(DECK * 2)
    assert decks(28, random.Random(1)) == decks(28, random.Random(1)) != decks(28, random.Random(2))


async def _one_call(tmp_path: Path) -> None:
    """Records with a call `c` of the trajectory `t`."""
    await (await Store.open(tmp_path / "records.db")).close()
    with sqlite3.connect(tmp_path / "records.db") as records:
        columns = "id, trajectory_id, model, step, status, late, started_at, ended_at, prompt_ids, body"
        records.execute(f"INSERT INTO calls ({columns}) VALUES ('c', 't', 'm', 0, 'complete', 0, 1, 2, x'', '{{}}')")
        row = ("c", 0, "complete", "stop", struct.pack("<2i", 7, 8), b"", '{"content": "so"}')
        names = "call_id, choice, status, finish_reason, token_ids, logprobs, message"
        records.execute(f"INSERT INTO outputs ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    records.close()


async def test_a_promise_that_is_not_kept_is_told(tmp_path: Path) -> None:
    """What the campaign looks for is what it finds."""
    await _one_call(tmp_path)
    journal = tmp_path / "journal"
    lines = [
        '{"kind": "call", "id": "c", "trajectory": "t", "tokens": [7, 8]}',
        '{"kind": "call", "id": "d", "trajectory": "t", "tokens": [7]}',
        '{"kind": "downloaded", "id": "m@1", "name": "m", "step": 1, "digest": "a"}',
        '{"kind": "downloaded", "id": "m@1", "name": "m", "step": 1, "digest": "b"}',
        '{"kind": "unanswered", "path": "/v1/messages", "status": 503, "why": "restarting"}',
        '{"kind": "unanswered", "path": "/v1/messages", "status": 500, "why": "KeyError in the server"}',
        '{"kind": "finished", "id": "t", "reward": 1.0, "calls": 1}',
        '{"kind": "trained", "id": "r", "step": 1, "applied": true}',
        '{"kind": "trained", "id": "q", "step": 1, "applied": false}',
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
        "t was finished with reward 1.0, the records do not have it",
        "downloads of ('m', 1) differ",
        "500 of /v1/messages is not documented: KeyError in the server",
        "t was finished with 1 calls, 2 were answered",
        "the result of r was told",
        "the state of m was written 3 times",
    ):
        assert words in told
    assert "c of t" not in told and len(told.splitlines()) == 8


async def test_a_step_whose_checkpoint_was_damaged_is_lost_and_the_others_are_found(tmp_path: Path) -> None:
    await _one_call(tmp_path)
    notes = {"0001": '{"request_id": "whole"}', "0002": '{"request_id": "cut off"', "0003": '{\x00"request_id": "x"}'}
    for step, text in notes.items():
        (tmp_path / "default/models/m/checkpoints" / step).mkdir(parents=True)
        (tmp_path / "default/models/m/checkpoints" / step / "offbook.json").write_text(text)
    trained = [{"kind": "trained", "id": name, "step": 1, "applied": True} for name in ("whole", "cut off")]
    (tmp_path / "journal").write_text("".join(f"{json.dumps(line)}\n" for line in trained))
    promises = Promises(tmp_path)
    promises.read([tmp_path / "journal"])
    [lost] = promises.broken()
    assert "the result of cut off was told" in lost


@pytest.mark.parametrize(("text", "tokens"), [("so", None), ("other", None), (None, [7, 8]), (None, [7])])
async def test_a_call_is_held_against_its_tokens_or_where_an_api_has_none_its_text(
    tmp_path: Path, text: str | None, tokens: list[int] | None
) -> None:
    await _one_call(tmp_path)
    said = {"text": text} if text is not None else {"tokens": tokens}
    line = {"kind": "call", "id": "c", "trajectory": "t"} | said
    (tmp_path / "journal").write_text(f"{json.dumps(line)}\n")
    promises = Promises(tmp_path)
    promises.read([tmp_path / "journal"])
    assert bool(promises.broken()) == (text == "other" or tokens == [7])


async def test_a_call_that_was_recorded_twice_is_told(tmp_path: Path) -> None:
    await _one_call(tmp_path)
    (tmp_path / "journal").write_text('{"kind": "finished", "id": "t", "reward": null, "calls": 1}\n')
    promises = Promises(tmp_path)
    promises.read([tmp_path / "journal"])
    assert "twice: t has 1 calls in the records, 0 were answered" in "\n".join(promises.broken())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", sorted(DOORS.keys() - {"completions"}))  # the scripted sampler answers chats
def test_an_answer_of_each_api_names_its_call_and_what_it_said(door: str, stream: bool) -> None:
    with scripted_server(lambda _: Action("an answer")) as server:
        wish = Wish("default", "hi", 8, 1, stream)
        answer = server.http.post(DOORS[door].path(wish), json=DOORS[door].body(wish), headers={TRAJECTORY_HEADER: "t"})
        assert answer.status_code == 200, answer.text
        events = [json.loads(data) for data in EventReader().push(answer.content) if data != b"[DONE]"]
        bodies = events if stream else [answer.json()]
        [call] = server.calls("t")
        assert DOORS[door].answered(bodies) in (
            {"id": call.id, "tokens": list(call.outputs[0].token_ids)},
            {"id": call.id, "text": "an answer"},
        )
        assert not stream or DOORS[door].answered(bodies[:-2]) is None, "nothing is acknowledged before its end"
