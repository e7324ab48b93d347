"""Ages count the server's own running time: what a jump of the clock, a sleep or a stop does to unclaimed calls."""

from __future__ import annotations

from offbook.server.records.running_time import RunningTime
from offbook.server.records.store import Store
from tests.server.records.test_store import a_call, a_record

DAY = 86_400.0
TTL = 7 * DAY


class Clocks:
    """A wall clock and a running time that a test moves."""

    def __init__(self) -> None:
        self.wall, self.running = 1_000 * DAY, 0.0

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds

    def time(self, stored: str | None = None) -> RunningTime:
        return RunningTime(stored, lambda: self.wall, lambda: self.running)


def test_a_call_is_as_old_as_the_server_has_run_since() -> None:
    clocks = Clocks()
    time = clocks.time()
    clocks.run(DAY)
    call = clocks.wall
    for _ in range(8):
        assert time.ago(TTL) <= call
        clocks.run(DAY)
        time.tick()
    assert time.ago(TTL) > call


def test_a_sleep_a_set_clock_and_a_stop_make_nothing_older() -> None:
    clocks = Clocks()
    time = clocks.time()
    clocks.run(600)
    time.tick()
    call = clocks.wall
    for jump in (30 * DAY, -40 * DAY, 400 * DAY):
        clocks.wall += jump
        clocks.run(60)
        time.tick()
        assert time.ago(TTL) < call, jump
    clocks.wall += 90 * DAY  # the server was down
    time = clocks.time(time.text())
    clocks.run(60)
    time.tick()
    assert time.ago(TTL) < call
    clocks.run(8 * DAY)
    time.tick()
    assert time.ago(TTL) > call


def test_what_an_older_version_recorded_is_young_when_this_one_starts() -> None:
    clocks = Clocks()
    time = clocks.time()
    assert time.ago(TTL) == clocks.wall - TTL


async def test_what_has_expired_is_told_when_its_trajectory_is_finished_and_nothing_in_flight_expires(
    store: Store,
) -> None:
    for name in ("gone", "gone", "sampled"):
        await store.add_call(a_call(name, at=10.0))
    assert await store.expire_unclaimed(500.0, ["sampled"]) == 2
    assert await store.finish([a_record("gone"), a_record("sampled")]) == {"gone": 0, "sampled": 1}
    assert await store.expired(["gone", "sampled", "unknown"]) == {"gone": 2}


async def test_the_running_time_outlives_a_restart(store: Store) -> None:
    assert await store.running() is None
    for text in ("[[1, 2]]", "[[1, 3]]"):
        await store.save_running(text)
    assert await store.running() == "[[1, 3]]"
