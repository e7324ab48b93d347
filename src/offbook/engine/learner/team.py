# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch's own annotations and safetensors' are partial
"""A team of learners: processes that compute the rows of a step together, each on a device of its own.

The first learner is the server's child and does all that a learner alone does: it plans, updates and saves. The others
(`follow`) know no models, jobs or checkpoints. A task brings them rows and the adapter's weights, and they
answer with scores, or with their part of the gradient. So learners cannot disagree about a plan, an optimizer or a step.
Tasks and answers travel over a socket pair, which is the other's stdin. So an idle team waits in no collective.

Each learner holds the whole base. The others are children of the first and in its process group. If one ends, the first
ends, which ends all.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from offbook.base.child_processes import die_with_parent, ending
from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError, TrainError
from offbook.base.terminal import echo

from ..protocol import LEARNER_MODULE
from .failures import Memory, describe_failure
from .rows.cost import ModelShape
from .rows.layouts import ComputeRow, row_cost
from .update.row_pass import Done, LastUpdate, LossInputs, RowPass, RowPolicy, Scores, Tally, UpdateState

if TYPE_CHECKING:
    from .model.policy import Policy

TEAM_BROKEN = 4
"""Exit code of the first learner when another one ended."""
_ENDING = threading.Lock()
"""Taken, and never released, by the thread that says which learner ended: several see it, and one line says it."""
Result = TypeVar("Result")


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


class Team:
    """The other learners, as the first one sees them. `lost(rank)` is called when learner `rank` has ended."""

    def __init__(self, connections: Sequence[Connection], lost: Callable[[int], NoReturn]) -> None:
        self._connections = tuple(connections)
        self._lost = lost

    @classmethod
    def start(cls, words: Sequence[str], size: int, gpus: Sequence[str] = ()) -> Team:
        """Start learners 1 to `size` - 1 with the options `words` of this one; they load the base meanwhile. `gpus`: the
        GPU that each sees; (): what this process sees. Raises OSError."""
        connections: list[Connection] = []
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ours, theirs = Pipe()
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", LEARNER_MODULE, *words, "--rank", str(rank)],
                    stdin=theirs.fileno(),
                    preexec_fn=die_with_parent(),
                    env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {})},
                )
            )
            theirs.close()
            connections.append(ours)

        def lost(rank: int) -> NoReturn:
            code = processes[rank - 1].wait()
            memory = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
            _ENDING.acquire()
            echo(f"The learner ends: learner {rank + 1} of {size} ended ({ending(code)}){memory}", err=True)
            os._exit(TEAM_BROKEN)

        for rank in range(1, size):
            threading.Thread(target=lost, args=(rank,), name=f"learner {rank + 1}", daemon=True).start()
        return cls(connections, lost)

    @property
    def size(self) -> int:
        """The number of learners, this one included."""
        return len(self._connections) + 1

    def join(self, policy: Policy, probe: Callable[[Policy], Result]) -> Result:
        """Wait until the others have loaded the base; return the result of `probe`, the probes of attention, which all run.
        Where trees are refused, `policy` refuses them too. Raises ConfigError if one could not load the base."""
        result = probe(policy)
        for rank, answer in enumerate(self._answers(), 1):
            if isinstance(answer, Refused):
                raise ConfigError(self._named(rank, answer.message))
            assert isinstance(answer, Joined)
            if answer.tree_refused is not None and policy.tree_refused is None:
                policy.tree_refused = self._named(rank, answer.tree_refused)
        return result

    def passes(self, policy: RowPolicy, inputs: LossInputs) -> RowPass:
        """What computes the rows of a step with the whole team."""
        return _TeamPass(cast("Policy", policy), inputs, self)

    def share(self, tasks: Sequence[Task], own: Callable[[], Result]) -> tuple[Result, list[Answer]]:
        """Give each of the others its task, do `own` meanwhile, and return all results. What `own` raises, or a TrainError
        for a task that failed, is raised when all have answered."""
        for rank, task in enumerate(tasks, 1):
            self._give(rank, task)
        try:
            result = own()
        except Exception:
            self._answers()  # they would be taken for those of the next tasks
            raise
        answers = self._answers()
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, Refused):
                raise TrainError(self._named(rank, answer.message), reason=answer.reason)
        return result, answers

    def _give(self, rank: int, task: Task) -> None:
        try:
            send(self._connections[rank - 1], task)
        except OSError:
            self._lost(rank)

    def _answers(self) -> list[Answer]:
        return [self._receive(rank) for rank in range(1, self.size)]

    def _receive(self, rank: int) -> Answer:
        try:
            return cast(Answer, receive(self._connections[rank - 1]))
        except (EOFError, OSError):
            self._lost(rank)

    def _named(self, rank: int, message: str) -> str:
        return f"learner {rank + 1} of {self.size}: {message}"


class _TeamPass(RowPass):
    """Spreads rows over the team. The sum of its parts is what one learner computes, up to the order of summation."""

    def __init__(self, policy: Policy, inputs: LossInputs, team: Team) -> None:
        super().__init__(policy, inputs)
        self._adapted = policy
        self._team = team
        seed = torch.initial_seed()
        team.share([Begin(inputs, (seed + rank) % 2**63) for rank in range(1, team.size)], lambda: None)

    def score(self, rows: Sequence[ComputeRow], into: Scores, done: Done, *, adapter: bool = True) -> None:
        own, *others = self._dealt(rows)
        state = AdapterState.of(self._adapted) if adapter else None
        _, answers = self._team.share(
            [ScoreRows(part, state) for part in others],
            lambda: super(_TeamPass, self).score(own, into, self._scaled(done, len(rows)), adapter=adapter),
        )
        for part, answer in zip(others, answers, strict=True):
            assert isinstance(answer, Scores)
            into.put(targets_of(part), answer.logprobs, answer.entropy, answer.kept)

    def backward(self, rows: Sequence[ComputeRow], update: UpdateState, done: Done) -> tuple[float, Tally]:
        own, *others = self._dealt(rows)
        state = AdapterState.of(self._adapted)
        (loss, tally), answers = self._team.share(
            [GradientOfRows(part, state, update) for part in others],
            lambda: super(_TeamPass, self).backward(own, update, self._scaled(done, len(rows))),
        )
        gradients: list[dict[str, Tensor]] = []
        for part, answer in zip(others, answers, strict=True):
            assert isinstance(answer, Gradient)
            loss += answer.loss
            tally.add(answer.tally)
            _merge(answer, targets_of(part), update)
            gradients.append(load(answer.gradients))
        _add(gradients, self._adapted)
        return loss, tally

    def _dealt(self, rows: Sequence[ComputeRow]) -> list[Rows]:
        return deal(rows, self._team.size, self._policy.shape)

    def _scaled(self, done: Done, total: int) -> Done:
        return lambda count: done(min(count * self._team.size, total))


def deal(rows: Sequence[ComputeRow], size: int, shape: ModelShape) -> list[Rows]:
    """`size` parts of about equal cost: the most expensive row first, each to the part that costs least so far."""
    costs, parts = [0.0] * size, [list[ComputeRow]() for _ in range(size)]
    for row in sorted(rows, key=lambda row: -row_cost(row, shape)):
        least = costs.index(min(costs))
        costs[least] += row_cost(row, shape)
        parts[least].append(row)
    return [tuple(part) for part in parts]


def _merge(answer: Gradient, target_numbers: Tensor, update: UpdateState) -> None:
    """Write what another learner left for these targets."""
    if update.first:
        update.old.put(target_numbers, answer.old.logprobs, answer.old.entropy, answer.old.kept)
    update.last.coefficients[target_numbers] = answer.last.coefficients
    update.last.logprobs[target_numbers] = answer.last.logprobs
    update.last.clipped[target_numbers] = answer.last.clipped


def _add(gradients: Sequence[dict[str, Tensor]], policy: Policy) -> None:
    """Add the others' gradients to the policy's, in float64 and in the order of the learners."""
    for name, parameter in policy.trainable_parameters().items():
        parts = [part[name] for part in gradients if name in part]
        if not parts:
            continue
        total = torch.zeros_like(parameter, dtype=torch.float64) if parameter.grad is None else parameter.grad.double()
        for part in parts:
            total += part.to(total)
        parameter.grad = total.to(parameter)


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
