"""The stored rollouts of a comparison: a JSON Lines file with one line per rollout, from which an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.types import Call, CallStatus, CallTrace, Frozen, Metric, Trajectory
from offbook.scenarios.identity import scenario_fields


class MeasuredCall(Frozen):
    """Time, tokens and cost of one call.

    Tokens are None if the provider did not report them. `cost` is in USD; None if the price is unknown, or for a local
    model, whose cost is computed from its seconds.
    """

    seconds: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    started_at: float
    cut: bool = False  # truncated by the token limit

    @classmethod
    def of(cls, call: Call | CallTrace) -> MeasuredCall:
        """Measure a call: one of a trained model with its tokens, or one of another LLM, which may not report them."""
        if isinstance(call, Call):
            prompt, written, cost = len(call.prompt_ids), sum(len(output.token_ids) for output in call.outputs), None
        else:
            prompt, written, cost = call.prompt_tokens, sum(output.tokens for output in call.outputs), call.cost
        known = prompt > 0
        return cls(
            seconds=max(call.ended_at - call.started_at, 0.0),
            prompt_tokens=prompt if known else None,
            completion_tokens=written if known else None,
            cost=cost,
            started_at=call.started_at,
            cut=call.status == CallStatus.TRUNCATED,
        )


def call_totals(calls: Sequence[MeasuredCall]) -> dict[str, float]:
    """Number, seconds, tokens and cost of calls. Tokens and cost only if all calls report them."""
    totals: dict[str, float] = {"calls": float(len(calls))}
    for name in ("prompt_tokens", "completion_tokens", "cost"):
        values = [getattr(call, name) for call in calls]
        if calls and None not in values:
            totals[name] = float(sum(values))
    return totals | ({"call_seconds": sum(call.seconds for call in calls)} if calls else {})


class ComparedRollout(Frozen):
    """One rollout of one candidate. `key` is a hash of everything it depends on."""

    key: str
    candidate: str
    step: int | None = None
    scenario: str
    index: int
    reward: float | None = None
    metrics: dict[str, Metric]
    error: str | None = None
    calls: tuple[MeasuredCall, ...] = ()
    seconds: float
    trajectory: Trajectory

    @property
    def failed(self) -> bool:
        """Whether it ended with an exception."""
        return self.error is not None


def content_hash(scenario: object) -> str:
    """Hash of all fields of a scenario: 16 hex digits."""
    content: object = scenario if isinstance(scenario, str) else scenario_fields(scenario)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


class Journal:
    """The file, written line by line. `rows`: the successful rollouts by key. A last line that a kill cut off is removed.

    Raises ConfigError for a file with invalid lines."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rows: dict[str, ComparedRollout] = {}
        lines = file.read_bytes().removesuffix(b"\n").split(b"\n") if file.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = ComparedRollout.model_validate_json(line)
            except ValidationError as error:
                if number < len(lines):
                    raise ConfigError(
                        f"{file}, line {number} is not a rollout of a comparison: delete the file, or name another folder"
                    ) from error
                file.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
            else:
                self.rows |= {} if row.failed else {row.key: row}

    def add(self, row: ComparedRollout) -> None:
        """Append a rollout to the file."""
        self.rows |= {} if row.failed else {row.key: row}
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(row.model_dump_json() + "\n")
