"""Measures a supervised training before it is done: tokens, messages that cannot be trained, the time of an update.

python -m offbook.engine.learner.dry_run --base DIR, with a DryRun as JSON on stdin. Writes a DryRunReport to the original
stdout, and nothing else anywhere: its adapter ends with the process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from offbook.base.config import LoraOptions
from offbook.base.errors import OffbookError
from offbook.engine.precision import device_name, dtype_of

from ..protocol import DryRun, DryRunReport, JobTrajectory
from .__main__ import original_stdout, parse
from .model.policy import Policy
from .targets.advantage import supervised_advantages
from .targets.batch import make_batch
from .targets.render import Renderer, last_turns
from .update.step import Step


def measure(policy: Policy, run: DryRun) -> DryRunReport:
    """Render all conversations, and time the update of the first batch. Raises ConfigError for a base without a template."""
    renderer = Renderer(policy.chat_template, policy.end_ids, policy.longest_context, skip_bad=True)
    examples: list[JobTrajectory] = []
    skipped: list[str] = []
    for number, history in enumerate(run.histories):
        plain = JobTrajectory(f"conversation {number}", None, (), (history,))
        example, faults = renderer.trajectory(last_turns(plain) if run.config.turns == "last" else plain, 0)
        skipped += faults
        examples += [example] if example.samples else []
    samples = [sample for example in examples for sample in example.samples]
    first = examples[: run.batch_size]
    seconds = _update_seconds(policy, first, run) if first else 0.0
    return DryRunReport(
        examples=len(examples),
        messages=len(samples),
        skipped=tuple(skipped),
        trained=sum(len(sample.completion_ids) for sample in samples),
        tokens=sum(sample.length for sample in samples),
        longest=max((sample.length for sample in samples), default=0),
        measured=sum(len(sample.completion_ids) for example in first for sample in example.samples),
        seconds=seconds,
    )


def _update_seconds(policy: Policy, examples: list[JobTrajectory], run: DryRun) -> float:
    groups = [[example] for example in examples]
    batch = make_batch(groups, supervised_advantages([[False] for _ in groups]), supervised=True)
    optimizer = torch.optim.AdamW(policy.trainable_parameters().values())
    began = time.monotonic()
    Step(policy, optimizer, batch, run.config, 0, lambda phase, done, total: None).run()
    return time.monotonic() - began


def main() -> int:
    """Answer the run on stdin. Returns the exit code: 1 with `error` in the report."""
    arguments, answers = parse(), original_stdout()
    try:
        run = DryRun.model_validate_json(sys.stdin.read())
        device = device_name(arguments.device)
        policy = Policy.load(Path(arguments.base), LoraOptions(), device, dtype_of(arguments.dtype, device))
        report = measure(policy, run)
    except (OffbookError, OSError, ValueError, RuntimeError) as error:
        report = DryRunReport(error=str(error) or type(error).__name__)
    answers.write(report.model_dump_json())
    answers.flush()
    return int(bool(report.error))


if __name__ == "__main__":
    sys.exit(main())
