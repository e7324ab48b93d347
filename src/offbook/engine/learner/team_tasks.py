# pyright: reportUnknownMemberType=false
# torch's own annotations and safetensors' are partial
"""What the first learner of a team and the others send each other, tasks and answers over a socket pair, and how the others answer
(`follow`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from offbook.base.config import LoraOptions

from .failures import Memory, describe_failure
from .rows.layouts import ComputeRow
from .update.row_pass import LastUpdate, LossInputs, RowPass, Scores, Tally, UpdateState

if TYPE_CHECKING:
    from .model.policy import Policy

Rows = tuple[ComputeRow, ...]


@dataclass(frozen=True)
class AdapterState:
    """The adapter that a task is for. `weights`: safetensors of its parameters by name."""

    lora: LoraOptions | None
    weights: bytes

    @classmethod
    def of(cls, policy: Policy) -> AdapterState:
        """The policy's adapter as it is."""
        return cls(policy.lora, packed(policy.trainable_parameters()))

    def give(self, policy: Policy) -> None:
        """Let the policy have this adapter."""
        if self.lora is not None and policy.lora != self.lora:
            policy.reset_adapter(self.lora)
        weights = load(self.weights)
        with torch.no_grad():
            for name, parameter in policy.trainable_parameters().items():
                parameter.copy_(weights[name])


@dataclass(frozen=True)
class Begin:
    """The next tasks are of a step with these inputs. `seed`: of the adapter's dropout."""

    inputs: LossInputs
    seed: int


@dataclass(frozen=True)
class ScoreRows:
    """Compute the scores of the rows' targets. `adapter` None: under the base."""

    rows: Rows
    adapter: AdapterState | None


@dataclass(frozen=True)
class GradientOfRows:
    """Compute the gradient of the rows' loss."""

    rows: Rows
    adapter: AdapterState
    update: UpdateState


@dataclass(frozen=True)
class Gradient:
    """The answer to GradientOfRows. `old` and `last`: of the rows' targets, in the order of `targets_of`. `gradients`:
    safetensors of the parameters that have one, by name."""

    loss: float
    tally: Tally
    old: Scores
    last: LastUpdate
    gradients: bytes


@dataclass(frozen=True)
class Joined:
    """The base is loaded. `tree_refused`: why it cannot be trained on trees there, else None."""

    tree_refused: str | None


@dataclass(frozen=True)
class Refused:
    """The task failed; see protocol.Failed."""

    reason: str
    message: str


Task = Begin | ScoreRows | GradientOfRows
Answer = Joined | Scores | Gradient | Refused | None


def targets_of(rows: Sequence[ComputeRow]) -> Tensor:
    """The numbers of the rows' targets, which no other row has."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(row.target_numbers for row in rows)]))


def packed(tensors: dict[str, Tensor] | dict[str, torch.nn.Parameter]) -> bytes:
    """The tensors as safetensors."""
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})


def send(connection: Connection, message: Task | Answer) -> None:
    """Send one message. Raises ConnectionError if the other learner has ended."""
    connection.send_bytes(
        pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    )  # `send` would share tensors by file descriptor


def receive(connection: Connection) -> object:
    """Wait for a message. Raises EOFError or ConnectionError if the other learner has ended."""
    return pickle.loads(connection.recv_bytes())


def follow(connection: Connection, load_base: Callable[[], Policy], device: str) -> None:
    """Answer the tasks of the first learner until it ends. `load_base` returns the policy, after the probes of attention."""
    worker: _Worker | None = None
    try:
        policy = load_base()
        worker = _Worker(policy)
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

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
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
            return _scores_of(scores, targets)
        update = task.update
        loss, tally = self._rows.backward(task.rows, update, _unreported)
        last = update.last
        return Gradient(
            loss,
            tally,
            _scores_of(update.old, targets),
            LastUpdate(last.coefficients[targets], last.logprobs[targets], last.clipped[targets]),
            self._gradients(),
        )

    def _gradients(self) -> bytes:
        parameters = self.policy.trainable_parameters()
        gradients = packed({name: value.grad for name, value in parameters.items() if value.grad is not None})
        for parameter in parameters.values():
            parameter.grad = None
        return gradients


def _unreported(_: int) -> None:
    """Only the first learner reports progress."""


def _scores_of(scores: Scores, target_numbers: Tensor) -> Scores:
    return Scores(scores.logprobs[target_numbers], scores.entropy[target_numbers], scores.kept[target_numbers])
