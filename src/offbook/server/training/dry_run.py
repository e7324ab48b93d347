"""Runs a dry run of supervised training in a process of its own, without a server."""

from __future__ import annotations

import subprocess
import sys

from pydantic import ValidationError

from offbook.base.child_processes import last_lines
from offbook.base.errors import EngineError

from ...engine.protocol import DRY_RUN_MODULE, DryRun, DryRunReport
from ..models.base_model import find


def dry_run(base_model: str, run: DryRun) -> DryRunReport:
    """Measure what the conversations come to on this base. Raises ConfigError for an unknown base, EngineError."""
    command = [sys.executable, "-m", DRY_RUN_MODULE, "--base", str(find(base_model).path)]
    done = subprocess.run(command, input=run.model_dump_json(), capture_output=True, text=True, encoding="utf-8")
    try:
        report = DryRunReport.model_validate_json(done.stdout)
    except ValidationError as error:
        last = "\n".join(last_lines(done.stderr, 5))
        raise EngineError(f"the dry run ended with code {done.returncode} and without a report: {last}") from error
    if report.error:
        raise EngineError(f"the dry run failed: {report.error}")
    return report
