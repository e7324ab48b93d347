# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""The other learners of a team: they answer the tasks of the first one (`team.py`)."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .failures import Memory, describe_failure
from .team_messages import (
    Accompany,
    Answer,
    Begin,
    Gradient,
    GradientOfRows,
    Joined,
    Probe,
    Refused,
    ScoreRows,
    Task,
    packed,
    receive,
    send,
    targets_of,
)
from .update.row_pass import LastUpdate, LossInputs, RowPass, Scores

if TYPE_CHECKING:
    from .model.policy import Policy


def follow(
    connection: Connection, load_base: Callable[[], Policy], device: str, probe: Callable[[Policy], object]
) -> None:
    """Answer the tasks of the first learner until it ends. `load_base` returns the policy. `probe` runs the probes of
    attention: of a sharded base when the first learner does, else at once."""
    worker: _Worker | None = None
    try:
        policy = load_base()
        if not policy.sharded:
            probe(policy)
        worker = _Worker(policy, probe)
        first: Answer = Joined(policy.tree_refused)
    except Exception as error:  # noqa: BLE001  # the boundary of the process: the first learner says it
        first = Refused(*describe_failure(error, Path(), Memory(device, loading=True)))
    try:
        send(connection, first)
        while True:
            task = cast(Task, receive(connection))
            assert worker is not None, "a task for a learner that did not load"
            send(connection, worker.answer(task))
    except (EOFError, OSError):
        return  # the first learner has ended


class _Worker:
    """Executes tasks on a policy."""

    def __init__(self, policy: Policy, probe: Callable[[Policy], object]) -> None:
        self.policy = policy
        self._probe = probe
        self._memory = Memory(str(policy.device), policy.four_bit)
        self._inputs: LossInputs | None = None
        self._rows: RowPass | None = None

    def answer(self, task: Task) -> Answer:
        """The answer to a task. Raises torch.AcceleratorError if the device is lost."""
        try:
            return self._execute(task)
        except Exception as error:
            reason, message = describe_failure(error, Path(), self._memory)
            if isinstance(error, torch.AcceleratorError) and reason != "out_of_memory":
                raise
            return Refused(reason, message)

    def _execute(self, task: Task) -> Answer:
        match task:
            case Probe():
                self.policy.use_call_flops(task.call_flops)
                self._probe(self.policy)
                return Joined(self.policy.tree_refused)
            case Accompany():
                with torch.no_grad():
                    self.policy.pass_without_targets()
                return None
            case Begin():
                torch.manual_seed(task.seed)
                self._inputs, self._rows = task.inputs, RowPass(self.policy, task.inputs)
                return None
            case ScoreRows() | GradientOfRows():
                return self._compute(task)

    def _compute(self, task: ScoreRows | GradientOfRows) -> Answer:
        assert self._inputs is not None and self._rows is not None, "Begin comes first"
        if task.adapter is not None:
            task.adapter.give(self.policy)
        targets = targets_of(task.rows)
        if isinstance(task, ScoreRows):
            scores = Scores.empty(len(self._inputs.sampler))
            self._rows.score(task.rows, scores, _unreported, adapter=task.adapter is not None)
            return _at(scores, targets)
        update = task.update
        loss, tally = self._rows.backward(task.rows, update, _unreported)
        last = update.last
        return Gradient(
            loss,
            tally,
            _at(update.old, targets),
            LastUpdate(last.coefficients[targets], last.logprobs[targets], last.clipped[targets]),
            self._gradients(),
        )

    def _gradients(self) -> bytes:
        """The gradients, which are cleared."""
        parameters = self.policy.trainable_parameters()
        gradients = packed({name: value.grad for name, value in parameters.items() if value.grad is not None})
        for parameter in parameters.values():
            parameter.grad = None
        return gradients


def _unreported(_: int) -> None:
    """Only the first learner reports progress."""


def _at(scores: Scores, target_numbers: Tensor) -> Scores:
    return Scores(scores.logprobs[target_numbers], scores.entropy[target_numbers], scores.kept[target_numbers])
