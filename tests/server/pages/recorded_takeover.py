"""The takeovers of `examples/on_the_job`, as a server has them in its records."""

from __future__ import annotations

import json
from typing import Any

from offbook.base.takeovers import TakeoverPlan, TakeoverState
from offbook.server.records.notes import save_notes
from offbook.server.records.store import Store
from offbook.server.records.takeover_threads import TakenThread, add_threads, begin_takeover
from offbook.server.takeover.stage import needs_of
from offbook.server.upstream.counts import RouteCounts
from tests.paths import ROOT

ROUTE = "order-desk"
RUN = json.loads((ROOT / "examples/on_the_job/results/seed-0.json").read_text("utf-8"))
PLAN = TakeoverPlan(stages=(0.0, 0.25, 1.0), margin=0.15)
SMALL, PAID = 17, 47
"""Threads of each side in the stage of 25 %."""


async def save_takeover(store: Store, route: str = ROUTE, **changed: Any) -> None:
    """Store the run's decisions, of four takeovers, what its paid calls cost, and the threads of one stage."""
    state = TakeoverState(
        route=route, status="left", id="takeover-4", model="order-desk@180", plan=PLAN, stage=2, needs=needs_of(PLAN)
    ).model_dump() | {"decisions": RUN["decisions"]}
    counts = RouteCounts(calls=RUN["paid_calls"], cost=RUN["paid_usd"])
    text = TakeoverState.model_validate(state | changed).model_dump_json()
    await store.write(save_notes, (f"route:{route}", counts.model_dump_json()))
    await store.write(save_notes, (f"takeover:{route}", f"{text}\n{{}}"))
    await store.write(begin_takeover, "takeover-4")
    sides = [(number, number < SMALL) for number in range(SMALL + PAID)]
    await store.write(add_threads, [TakenThread(f"t-{number}", "takeover-4", 1, small, 1.0) for number, small in sides])
