"""The stored rollouts of a comparison: a JSON Lines file with one line per rollout, written when it ends."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.types import Frozen, Metric, Trajectory
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


class ComparedRollout(Frozen):
    """One rollout of one candidate. `key` is a hash of everything it depends on; `app` is the hash of the app's file."""

    key: str
    app: str = ""
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
    """The file of stored rollouts, written line by line, so that an interrupted comparison can resume.

    Raises ConfigError for a file with invalid lines.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows = _read(file)

    def known(self, key: str) -> ComparedRollout | None:
        """The successful rollout with this key; None if there is none."""
        return self._rows.get(key)

    def rows(self) -> list[ComparedRollout]:
        """All successful rollouts, in the order of the file."""
        return list(self._rows.values())

    def add(self, row: ComparedRollout) -> None:
        """Append a rollout to the file."""
        if not row.failed:
            self._rows[row.key] = row
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(row.model_dump_json() + "\n")


def _read(file: Path) -> dict[str, ComparedRollout]:
    """The successful rollouts by key. An incomplete last line is removed from the file."""
    if not file.exists():
        return {}
    rows: dict[str, ComparedRollout] = {}
    lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = ComparedRollout.model_validate_json(line)
        except ValidationError as error:
            if number == len(lines):
                _drop_last(file, lines)
                continue
            raise ConfigError(
                f"{file}, line {number} is not a rollout of a comparison; name another folder, or start over with --fresh"
            ) from error
        if not row.failed:
            rows[row.key] = row
    return rows


def _drop_last(file: Path, lines: list[bytes]) -> None:
    file.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
