# pyright: reportUnknownMemberType=false
# torch's own annotations and safetensors' are partial
"""What the first learner of a team and the others send each other: tasks and answers, over a socket pair."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from offbook.base.config import LoraOptions

from .rows.layouts import ComputeRow
from .update.row_pass import LastUpdate, LossInputs, Scores, Tally, UpdateState

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
class Probe:
    """Run the probes of attention together with the first learner, whose planner weighs launches by `call_flops`."""

    call_flops: float


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
class Accompany:
    """Make one forward pass, because the first learner makes one with the sharded base."""


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
    """The base is loaded, or the answer to Probe. `tree_refused`: why it cannot be trained on trees there, else None."""

    tree_refused: str | None


@dataclass(frozen=True)
class Refused:
    """The task failed; see protocol.Failed."""

    reason: str
    message: str


Task = Probe | Begin | ScoreRows | GradientOfRows | Accompany
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
