"""Reports of evaluations: as a JSON file, with intervals, and as a regression gate for continuous integration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from offbook.base.config import describe
from offbook.base.errors import ConfigError
from offbook.base.text import counted

from .evaluate import Evaluation
from .statistics import bootstrap_mean, paired_difference

_EVALUATION = TypeAdapter(Evaluation)


def report_json(evaluation: Evaluation) -> str:
    """The evaluation as JSON for `read_report`, plus the field `success`."""
    return json.dumps(asdict(evaluation) | {"success": evaluation.success}, indent=1) + "\n"


def read_report(file: Path) -> Evaluation:
    """Read the file that `offbook eval --json` wrote. Raises ConfigError, which names the faulty field."""
    try:
        loaded: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no report of `offbook eval --json`: {error}") from error
    fields = cast(dict[str, object], loaded) if isinstance(loaded, dict) else {}
    if not fields.get("scores"):
        raise ConfigError(f"{file} is no report of `offbook eval --json`: it has no `scores`")
    try:
        return _EVALUATION.validate_python({name: value for name, value in fields.items() if name != "success"})
    except ValidationError as error:
        raise ConfigError(f"{file} is no report of `offbook eval --json`:\n{describe(error, file.name)}") from error


def measured(evaluation: Evaluation, success_at: float | None) -> tuple[str, dict[str, float]]:
    """The measure of the evaluation and its values by scenario id: `success` if any scenario has one, else `reward`."""
    successes = evaluation.successes(success_at)
    return ("success", successes) if successes else ("reward", evaluation.rewards())


def interval_lines(evaluation: Evaluation, success_at: float | None = None) -> list[str]:
    """The mean with its 95 % interval over scenarios, and pass@k if scenarios have several rollouts."""
    name, values = measured(evaluation, success_at)
    if not values:
        return []
    lines = [f"{name} {bootstrap_mean(list(values.values())).text()} over {counted(len(values), 'scenario')}"]
    most = max((len(score.succeeded(success_at)) for score in evaluation.scores), default=0)
    if name == "success" and most > 1:
        lines.append(", ".join(f"pass@{k} {evaluation.pass_at(k, success_at):.3f}" for k in dict.fromkeys((1, most))))
    return lines


class RegressionGate:
    """Fails an evaluation that is below a number, or worse than an earlier report with 95 % confidence."""

    def __init__(self, below: float | None, worse_than: Path | None, success_at: float | None = None) -> None:
        self._below = below
        self._baseline = None if worse_than is None else (worse_than, read_report(worse_than))
        self._success_at = success_at

    def examine(self, evaluation: Evaluation) -> tuple[list[str], list[str]]:
        """(lines to print, reasons to fail); without reasons, the evaluation passes. Raises ConfigError for a baseline
        of other scenarios or with another measure."""
        lines: list[str] = []
        faults: list[str] = []
        name, values = measured(evaluation, self._success_at)
        if not values:
            return lines, faults
        mean = sum(values.values()) / len(values)
        if self._below is not None and mean < self._below:
            faults.append(f"--fail-below {self._below:g}: {name} {mean:.3f} is below it")
        if self._baseline is not None:
            file, baseline = self._baseline
            other, before = measured(baseline, self._success_at)
            if other != name:
                raise ConfigError(f"{file} measures {other}, this evaluation {name}: give --success-at to compare them")
            difference = paired_difference(values, before)
            shared = len(values.keys() & before.keys())
            lines.append(
                f"{name} against {file}: {difference.text('+')} on {counted(shared, 'scenario')} that both have"
            )
            if difference.high < 0:
                faults.append(f"--fail-if-worse-than {file}: {name} is lower by {-difference.mean:.3f}")
        return lines, faults
