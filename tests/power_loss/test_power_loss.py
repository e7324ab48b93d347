"""A loss of power at any moment: what is loaded afterwards is the old or the new, whole, and what was promised is there."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offbook.base.errors import OffbookError
from offbook.base.types import Call
from offbook.engine import checkpoint_files
from offbook.server.models.checkpoints import read_facts
from offbook.server.records.database import fault_of
from offbook.server.records.store import Store

from .disk import losses, recorded, recorder
from .writers import CALLS, CHANGES, call

IMAGES = 40
"""Moments at which the power goes, around syncs and renames first; three images each."""


@pytest.fixture(scope="module")
def library(require: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(shutil.which("cc") is not None, "apt-get install gcc libc6-dev")
    return recorder(tmp_path_factory.mktemp("recorder"))


def count_of(acks: list[str], what: str) -> int:
    """The last number that was acknowledged of something."""
    return max((int(ack.rpartition("-")[2]) for ack in acks if ack.startswith(f"{what}-")), default=0)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_checkpoints_state_and_facts_are_the_old_or_the_new_after_a_loss_of_power(
    library: Path, tmp_path: Path
) -> None:
    root, operations = recorded(library, tmp_path, "files")
    seen: set[tuple[int, int]] = set()
    forked = ("fork", CHANGES)
    for moment, image, acks in losses(root, operations, tmp_path, moments=IMAGES, seed=0):
        folder = image / "project" / "models" / "agent"
        facts = folder / "model.json"
        assert read_facts(folder).name == "agent" if facts.exists() else "facts" not in acks, moment
        state = folder / "state.json"
        written = json.loads(state.read_text("utf-8"))["value"]["count"] if state.exists() else 0
        newest = newest_step(folder / "checkpoints", moment)
        for kept, promised in ((written, count_of(acks, "state")), (newest, count_of(acks, "step"))):
            assert promised <= kept <= promised + 1, f"{moment}: {kept} is there, {promised} was acknowledged"
        fork = image / "project" / "models" / "fork"
        assert fork.exists() or "fork" not in acks, moment
        assert not fork.exists() or (read_facts(fork).name, newest_step(fork / "checkpoints", moment)) == forked, moment
        seen.add((written, newest))
    assert {(0, 0), (CHANGES, CHANGES)} <= seen


def newest_step(folder: Path, moment: str) -> int:
    """Fails for a checkpoint that is there and not whole: none is put in place before it is on the disk."""

    def damaged(path: Path, error: OffbookError) -> None:
        raise AssertionError(f"{moment}: {path.name} is there and not whole: {error}")

    return next((checkpoint.step for checkpoint in checkpoint_files.whole(folder, damaged)), 0)


@pytest.mark.slow("losses of power")
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "normal"])
def test_records_are_whole_after_a_loss_of_power_and_lose_only_the_last_commits_unless_durable(
    library: Path, tmp_path: Path, durable: bool
) -> None:
    root, operations = recorded(library, tmp_path, "records", *(["durable"] if durable else []))
    lost = 0
    counts: set[int] = set()
    for moment, image, acks in losses(root, operations, tmp_path, moments=IMAGES, seed=1):
        promised = sum(ack.startswith("call-") for ack in acks)
        kept = asyncio.run(calls_in(image / "records.db", moment))
        assert list(kept) == list(range(len(kept))), f"{moment}: there is a gap in the calls, {sorted(kept)}"
        assert all(found == call(number) for number, found in kept.items()), moment
        if durable:
            assert len(kept) >= promised, f"{moment}: {promised} calls were acknowledged, {len(kept)} are there"
        lost += max(0, promised - len(kept))
        counts.add(len(kept))
    assert 0 in counts and CALLS in counts
    assert (lost == 0) == durable, "what NORMAL may lose, as docs/promises.md says, is what the test can see"


async def calls_in(path: Path, moment: str) -> dict[int, Call]:
    """The recorded calls by their number, from records that open as they are."""
    fault = fault_of(path, "integrity_check")
    assert fault is None, f"{moment}: {fault}"
    store = await Store.open(path)
    try:
        found = await store.calls_of([f"trajectory-{number}" for number in range(CALLS)])
    finally:
        await store.close()
    return {number: calls[0] for number in range(CALLS) if (calls := found[f"trajectory-{number}"])}
