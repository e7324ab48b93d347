"""The training API by script, for the order of things: each update waits for its gate, fails on demand, and moves the step."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import offbook

from .scripted_api import Asked, Reply, ScriptedApi, scripted_api


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass
class ScriptedTraining:
    """`steps` holds each model's step. Update `n`, counted from 1 over all models, has arrived when `arrived[n]` is set, and
    ends when `gates[n]` is; those in `failing` are not applied and say so, those in `without_signal` train nothing."""

    steps: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    gates: dict[int, threading.Event] = field(default_factory=lambda: defaultdict[int, threading.Event](open_gate))
    arrived: dict[int, threading.Event] = field(
        default_factory=lambda: defaultdict[int, threading.Event](threading.Event)
    )
    kept: dict[int, threading.Event] = field(default_factory=lambda: defaultdict[int, threading.Event](threading.Event))
    failing: set[int] = field(default_factory=set[int])
    without_signal: set[int] = field(default_factory=set[int])
    requests: list[Any] = field(default_factory=list[Any])
    logs: list[Any] = field(default_factory=list[Any])
    ended: list[str] = field(default_factory=list[str])
    finishes: int = 0  # how often rollouts were finished
    api: ScriptedApi | None = None

    def model(self, name: str = "agent") -> offbook.TrainableModel:
        assert self.api is not None
        return offbook.TrainableModel(name, base_model="tiny", backend=offbook.RemoteBackend(self.api.url))

    def close(self, *updates: int) -> None:
        """Let these updates wait for their gates."""
        for update in updates:
            self.gates[update] = threading.Event()

    def answer(self, request: Asked) -> Reply | None:
        """The script."""
        if request.path == "/api/train":
            return self._update(request)
        if request.path == "/api/trajectories":
            self.finishes += 1
            self.kept[self.finishes].set()
            return None
        if request.path == "/api/runs/ended":
            self.ended.append(request.body["run"])
            return Reply(json={})
        if request.path.startswith("/api/models/"):
            name, _, what = request.path.removeprefix("/api/models/").partition("/")
            if what == "log":
                self.logs.append(request.body)
            if what == "checkpoints":
                return Reply(json=[])
            state = {"name": name, "project": "default", "base_model": "tiny", "lora": {}, "checkpoint": None}
            return Reply(json=None if what == "log" else state | {"step": self.steps[name]})
        return None

    def _update(self, request: Asked) -> Reply:
        self.requests.append(request.body)
        number, name = len(self.requests), request.body["model"]
        self.arrived[number].set()
        assert self.gates[number].wait(60), f"the gate of update {number} stayed closed for 60 s"
        if number in self.failing:
            error = {"message": "NaN in a gradient", "code": "nan", "param": None}
            return Reply(events=({"kind": "error", "message": error["message"], "error": error},))
        applied = number not in self.without_signal
        self.steps[name] += applied
        done = {"model": name, "step": self.steps[name], "applied": applied, "request_id": request.body["id"]}
        if not applied:
            why = "all rewards of each group are equal"
            done |= {"reason": "no_signal", "no_signal": "equal_rewards", "why": why}
        return Reply(events=({"kind": "result", "result": done},))


@contextmanager
def scripted_training() -> Generator[ScriptedTraining]:
    """Serve on a free port until the block ends; the gates that are still closed are opened then."""
    training = ScriptedTraining()
    with scripted_api(training.answer) as training.api:
        try:
            yield training
        finally:
            for gate in training.gates.values():
                gate.set()
