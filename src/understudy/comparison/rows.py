"""The rollouts of a comparison as they are kept: one line of JSON each, written when the rollout ends."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from understudy.errors import ConfigError
from understudy.scenarios.identity import scenario_fields
from understudy.types import Frozen, Metric, Trajectory


class MeasuredCall(Frozen):
    """What one call took. None: the provider did not tell, or its price is unknown. `cost` is in USD; a local model's is
    counted from its seconds."""

    seconds: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    started_at: float
    cut: bool = False  # ended by the limit of tokens


class ComparedRollout(Frozen):
    """One rollout of one candidate. `key` is the fingerprint of what it depends on; `app` that of the app's file."""

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
    """Of everything that the scenario says."""
    content: object = scenario if isinstance(scenario, str) else scenario_fields(scenario)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


class Journal:
    """The file of the rows, written line by line, so that a comparison that was interrupted goes on where it was."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows = _read(file)

    def known(self, key: str) -> ComparedRollout | None:
        """The rollout of that key that ended well."""
        return self._rows.get(key)

    def add(self, row: ComparedRollout) -> None:
        """Write a row, to the disk's cache at once."""
        if not row.failed:
            self._rows[row.key] = row
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(row.model_dump_json() + "\n")


def _read(file: Path) -> dict[str, ComparedRollout]:
    """By key, those that ended well. A line that was cut off at the end of the file is passed over."""
    if not file.exists():
        return {}
    rows: dict[str, ComparedRollout] = {}
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = ComparedRollout.model_validate_json(line)
        except ValidationError as error:
            if number == len(lines):
                _drop_last(file, lines)
                continue
            raise ConfigError(
                f"{file}, line {number} is no rollout of a comparison; name another folder, or begin anew with --fresh"
            ) from error
        if not row.failed:
            rows[row.key] = row
    return rows


def _drop_last(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
