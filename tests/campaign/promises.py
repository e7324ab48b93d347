"""What the journals of the clients were promised, held against the records and folders of the server."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
TOLD = (408, 429, 502, 503, 507)
"""Statuses of answers that a request may be sent again after. 500 is none of them."""


@dataclass
class Promises:
    """Everything that clients were answered so far. `rolled_back`: train requests whose checkpoint was damaged by the
    campaign. `again`: models and steps that were so trained twice."""

    folder: Path
    calls: dict[str, Line] = field(default_factory=dict)
    finished: dict[str, Line] = field(default_factory=dict)
    trained: dict[str, Line] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    downloaded: dict[tuple[str, int], str] = field(default_factory=dict)
    again: set[tuple[str, int]] = field(default_factory=set)
    unanswered: int = 0
    rolled_back: set[str] = field(default_factory=set)
    contradictions: list[str] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self, journals: list[Path]) -> None:
        """Take in what is new in the journals; a line that is still being written is left for the next time."""
        for path in journals:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.split(b"\n")[:-1]:
                self._take(json.loads(line))

    def _take(self, line: Line) -> None:
        match line["kind"]:
            case "call":
                self._once(self.calls, line)
            case "finished":
                self._once(self.finished, line)
            case "trained":
                self._once(self.trained, line)
            case "state":
                self.state[line["name"]] = line["count"]
            case "downloaded":
                place = (line["name"], line["step"])
                if place not in self.again and self.downloaded.setdefault(place, line["digest"]) != line["digest"]:
                    self.contradictions.append(f"two answers for one request: downloads of {place} differ")
            case _:
                self.unanswered += 1
                if line.get("status", 0) not in (0, *TOLD):
                    self.contradictions.append(f"{line['status']} of {line['path']} is not documented: {line['why']}")

    def _once(self, known: dict[str, Line], line: Line) -> None:
        before = known.setdefault(line["id"], line)
        if before != line:
            self.contradictions.append(f"two answers for one request: {before} and {line}")

    # ---- what is kept

    def broken(self) -> list[str]:
        """Each promise that is not kept, one line each."""
        with closing(sqlite3.connect(f"file:{self.folder / 'records.db'}?mode=ro", uri=True, timeout=30)) as records:
            found = [*self.contradictions, *self._lost_calls(records), *self._lost_rollouts(records)]
            found += self._steps(records)
        found += [*self._lost_state(), *self._other_downloads()]
        self.contradictions = []
        return found

    def _lost_calls(self, records: sqlite3.Connection) -> Iterator[str]:
        """An API without token ids promises its text."""
        rows = records.execute(
            "SELECT call_id, trajectory_id, token_ids, message FROM outputs JOIN calls ON calls.id = call_id"
        )
        kept = {call: (trajectory, tokens, message) for call, trajectory, tokens, message in rows}
        for call, line in self.calls.items():
            if call not in kept:
                yield f"lost: {call} of {line['trajectory']} was answered and is not in the records"
                continue
            trajectory, tokens, message = kept[call]
            same = (
                list(struct.unpack(f"<{len(tokens) // 4}i", tokens)) == line["tokens"]
                if "tokens" in line
                else (json.loads(message).get("content") or "") == line["text"]
            )
            if not same or trajectory != line["trajectory"]:
                yield f"lost: {call} of {line['trajectory']} is another in the records than in its answer"

    def _lost_rollouts(self, records: sqlite3.Connection) -> Iterator[str]:
        kept = dict(records.execute("SELECT id, reward FROM trajectories"))
        answered: dict[str, int] = defaultdict(int)
        for line in self.calls.values():
            answered[line["trajectory"]] += 1
        usable = dict(
            records.execute(
                "SELECT trajectory_id, COUNT(*) FROM calls WHERE status = 'complete' GROUP BY trajectory_id"
            )
        )
        for name, line in self.finished.items():
            if name not in kept or kept[name] != line["reward"]:
                told = f"the records say {kept[name]}" if name in kept else "the records do not have it"
                yield f"lost: {name} was finished with reward {line['reward']}, {told}"
            if line["calls"] < answered[name]:
                yield f"lost: {name} was finished with {line['calls']} calls, {answered[name]} were answered"
            if usable.get(name, 0) > answered[name] and not line.get("failed"):
                yield f"twice: {name} has {usable[name]} calls in the records, {answered[name]} were answered"

    def _steps(self, records: sqlite3.Connection) -> Iterator[str]:
        """A step belongs to one request, and a request to one step."""
        by_step: dict[tuple[str, int], str] = {}
        for request, (model, result) in results(records).items():
            told = self.trained.get(request)
            if told is not None and (told["step"], told["applied"]) != (result["step"], result["applied"]):
                yield f"twice: {request} was told step {told['step']}, the records say {result['step']}"
            if not result["applied"] or request in self.rolled_back:
                continue
            other = by_step.setdefault((model, result["step"]), request)
            if other != request:
                yield f"twice: step {result['step']} of {model} is said to be of {other} and of {request}"
        applied = {request for request, told in self.trained.items() if told["applied"]}  # else nothing can be lost
        for request in applied - results(records).keys() - self._in_checkpoints() - self.rolled_back:
            yield f"lost: the result of {request} was told, and is neither in the records nor in a checkpoint"

    def _in_checkpoints(self) -> set[str]:
        """Requests whose checkpoint is there: records that were full or locked get their results from it later. A note that
        was damaged names none; its request is among those that were rolled back."""
        requests: set[str] = set()
        for note in self.folder.glob("default/models/*/checkpoints/[0-9]*/offbook.json"):
            with suppress(ValueError):
                requests.add(json.loads(note.read_text("utf-8"))["request_id"])
        return requests

    def steps(self) -> dict[str, int]:
        """Requests that were applied to each model and not rolled back: its step."""
        with closing(sqlite3.connect(f"file:{self.folder / 'records.db'}?mode=ro", uri=True, timeout=30)) as records:
            counts: dict[str, int] = defaultdict(int)
            for request, (model, result) in results(records).items():
                counts[model] += bool(result["applied"]) and request not in self.rolled_back
        return counts

    def roll_back(self, model: str, step: int) -> None:
        """Steps from `step` on are no more."""
        self.again.add((model, step))
        self.downloaded.pop((model, step), None)
        with closing(sqlite3.connect(f"file:{self.folder / 'records.db'}?mode=ro", uri=True, timeout=30)) as records:
            for request, (name, result) in results(records).items():
                if name == model and result["applied"] and result["step"] >= step:
                    self.rolled_back.add(request)

    def _other_downloads(self) -> Iterator[str]:
        for (name, step), digest in self.downloaded.items():
            file = (
                self.folder / "default" / "models" / name / "checkpoints" / f"{step:04d}" / "adapter_model.safetensors"
            )
            if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                yield f"lost: the download of {name}@{step} was another than its checkpoint"

    def _lost_state(self) -> Iterator[str]:
        for name, count in self.state.items():
            path = self.folder / "default" / "models" / name / "state.json"
            try:
                kept = json.loads(path.read_text("utf-8"))["value"]["count"]
            except (OSError, ValueError, KeyError) as error:
                yield f"lost: the state of {name} was written {count} times and cannot be read: {error!r}"
                continue
            if kept < count:
                yield f"lost: the state of {name} was written {count} times, the file says {kept}"


def results(records: sqlite3.Connection) -> dict[str, tuple[str, Line]]:
    """The model and the result of every request that is done."""
    rows = records.execute("SELECT id, model, status FROM trains WHERE state = 'done'")
    return {request: (model, json.loads(status)["result"]) for request, model, status in rows}
