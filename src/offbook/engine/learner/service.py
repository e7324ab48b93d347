"""Executes the commands of the learner's process, one at a time. Every command is answered by events. Where sampler and learner share
a GPU, the learner is in host memory between steps."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import Tensor, nn

from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.types import TrainResult

from ..precision import dtype_of
from ..protocol import (
    Command,
    CompletionScored,
    Event,
    Failed,
    MergeCommand,
    Ready,
    ScoreCommand,
    StopCommand,
    TrainCommand,
    Trained,
)
from .failures import Memory, describe_failure
from .learner import Learner
from .model.merge import merge
from .model.policy import Policy
from .model.probes import base_logprobs, eager_probe, mask_probe
from .team import Team
from .update.row_pass import RowPass


class Service:
    """Loads the policy and executes commands. `arguments`: see `__main__.parse`, with `device` resolved from `auto`.
    `events`: the stream for events. `team`: the other learners, if there are some."""

    def __init__(self, arguments: argparse.Namespace, events: TextIO, team: Team | None = None) -> None:
        self._base = Path(arguments.base)
        self._events = events
        self._ends = ""  # why the process must end; empty: it goes on
        device: str = arguments.device
        self._policy = load_policy(arguments)
        self._team = team
        self._memory = Memory(device, self._policy.four_bit)
        passes = team.passes if team is not None else RowPass
        self.learner = Learner(self._policy, arguments.name or str(self._base), self.emit, arguments.row_limit, passes)
        self._host: HostMemory | None = None
        if arguments.offload:
            self._host = HostMemory(lambda: self._policy.model, lambda: self.learner.optimizer, self._policy.device)

    @property
    def offloaded(self) -> bool:
        """Whether the learner is in host memory."""
        return self._host is not None and self._host.away

    def emit(self, event: Event) -> None:
        """Write one event as a JSON line."""
        self._events.write(event.model_dump_json() + "\n")
        self._events.flush()

    def ready(self) -> Ready:
        """Run the probes of attention, and return the facts about the learner that `doctor` shows. Raises
        ConfigError for an attention that computes plain rows wrong."""
        policy = self._policy
        team = self._team
        difference = probes(policy) if team is None else team.join(policy, probes)
        refused = policy.tree_refused
        facts = {
            "device": str(policy.device),
            "dtype": str(policy.dtype).removeprefix("torch.") + (", base in 4 bits" if policy.four_bit else ""),
            "loader": f"{policy.loader} {importlib.metadata.version(policy.loader)}",
            "attention": policy.attention,
            "parameters": str(policy.base_parameters),
            "threads": str(torch.get_num_threads()),
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
            **({"learners": str(team.size)} if team is not None else {}),
            "mask_probe": f"ok, differs by {policy.tree_difference:.1e} nats"
            if refused is None
            else f"refused: {refused}",
            "plain_rows": "not compared with eager attention: Unsloth's own"
            if difference is None
            else f"ok, differ by {difference:.1e} nats from eager attention",
            "chat_template": _chat_template(policy),
            **({"left_out": f"{', '.join(policy.left_out)} (no adapter there)"} if policy.left_out else {}),
        }
        echo("The learner: " + "; ".join(f"{name} {value}" for name, value in facts.items()), err=True)
        if refused is not None:
            echo(f"The token tree is off for this model, plain rows are used: {refused}", err=True)
        if self._host is not None:
            self._host.leave()
        _release_memory()  # what the probe took: the sampler starts beside this process
        return Ready(facts=facts, linear_layers=policy.linear_layers)

    def run(self, commands: Iterable[Command]) -> None:
        """Execute commands until a stop command, or until the device is lost."""
        for command in commands:
            if isinstance(command, StopCommand):
                return
            event = self.answer(command)
            if not self._ends:
                _release_memory()
            self.emit(event)
            if self._ends:
                echo(f"The learner ends: {self._ends}", err=True)
                return

    def answer(self, command: TrainCommand | MergeCommand | ScoreCommand) -> Event:
        """Execute a command and return its last event. A failure is an event too; the process goes on unless the device
        is lost."""
        try:
            if isinstance(command, TrainCommand):
                with self._on_device():
                    result = self.learner.train(command)
                echo(step_line(result, self._policy.tree_refused), err=True)
                return Trained(request_id=command.request_id, result=result)
            if isinstance(command, ScoreCommand):
                with self._on_device():
                    values = base_logprobs(
                        self._policy, command.prompt_ids, command.completion_ids, command.temperature
                    )
                return CompletionScored(request_id=command.request_id, logprobs=tuple(map(float, values)))
            folders = (self._base, command.adapter, command.output)
            return merge(*folders, self._policy.dtype, gguf=command.gguf, request_id=command.request_id)
        except Exception as error:  # noqa: BLE001  # the boundary of the process: the server gets every failure as an event
            place = _written_to(command, self._base)
            reason, message = describe_failure(error, place, self._memory)
            if isinstance(error, torch.AcceleratorError) and reason != "out_of_memory":
                self._ends = "its device fails every call from now on"
            return Failed(request_id=command.request_id, reason=reason, message=message)

    def _on_device(self) -> AbstractContextManager[object]:
        return self._host.on_device() if self._host is not None else nullcontext()


def load_policy(arguments: argparse.Namespace) -> Policy:
    """The base with a fresh adapter, as the command line says. Raises ConfigError, OSError."""
    threads: int | None = arguments.threads
    if threads is None and arguments.learners > 1:
        threads = max(1, torch.get_num_threads() // arguments.learners)
    policy = Policy.load(
        Path(arguments.base),
        LoraOptions(),
        arguments.device,
        dtype_of(arguments.dtype, arguments.device),
        threads=threads,
        deterministic=arguments.deterministic,
        loader=arguments.loader,
        load_in_4bit=arguments.load_in_4bit,
        name=arguments.name,
    )
    policy.prompt_date = arguments.prompt_date
    return policy


def probes(policy: Policy) -> float | None:
    """Run the probes of attention. The result of `eager_probe`; raises as it does."""
    difference = eager_probe(policy)
    mask_probe(policy)
    return difference


def _chat_template(policy: Policy) -> str:
    try:
        warnings = policy.chat_template.warnings(policy.end_ids)
        return f"warning: {'; '.join(warnings)}" if warnings else "ok"
    except ConfigError as error:  # recorded calls are trained without a template
        return f"warning: {error}"


def _written_to(command: TrainCommand | MergeCommand | ScoreCommand, base: Path) -> Path:
    """The folder that a full disk would concern."""
    match command:
        case TrainCommand():
            return command.checkpoints
        case MergeCommand():
            return command.output
        case ScoreCommand():
            return base


def step_line(result: TrainResult, tree_refused: str | None) -> str:
    """The log's line of a step: `agent, step 3: 1,204 tokens computed as tree`."""
    metrics = result.metrics
    layouts = [name for name in ("tree", "leaf_rows", "call_rows") if metrics.get(f"layout/{name}")]
    computed = f"{metrics.get('tokens/computed', 0):,.0f} tokens computed as {' and '.join(layouts)}"
    refusal = "" if tree_refused is None else f"; the token tree is refused: {tree_refused}"
    return f"{result.model}, step {result.step}: {computed if layouts else 'nothing computed'}{refusal}"


def _release_memory() -> None:
    """Release torch's cached GPU memory, and cuBLAS's workspaces in it, which a sampler on the same GPU needs now."""
    if torch.cuda.is_available():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]  # torch's own graph trees call it; there is no public one
        torch.cuda.empty_cache()


class HostMemory:
    """Moves the tensors of a model and its optimizer between `device` and host memory. The tensor objects stay the
    same, and the copies are bit-exact. Host memory is pinned if the device is CUDA. Frozen weights never change, so
    their host copy is kept and not written again."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        optimizer: Callable[[], torch.optim.Optimizer | None],
        device: torch.device,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._pinned = device.type == "cuda"
        self._frozen: dict[int, tuple[Tensor, Tensor]] = {}
        self._away: dict[int, Tensor] = {}

    @property
    def away(self) -> bool:
        """Whether anything is in host memory."""
        return bool(self._away)

    @contextmanager
    def on_device(self) -> Generator[None]:
        """Move everything to the device for the block, and to host memory afterwards, also after an error."""
        try:
            self.back()
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Move everything to host memory. Gradients are dropped."""
        for parameter in self._model().parameters():
            parameter.grad = None
        for tensor, frozen in self._tensors():
            if tensor.device != self._device or id(tensor) in self._away:
                continue
            copy = self._copied(tensor) if frozen else self._to_host(tensor)
            tensor.data = copy
            self._away[id(tensor)] = tensor

    def back(self) -> None:
        """Move everything back to the device. If torch raises, the rest stays in host memory."""
        for key, tensor in list(self._away.items()):
            tensor.data = self._to_device(tensor)
            del self._away[key]
        if self._pinned:
            torch.cuda.synchronize(self._device)

    def _tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """All tensors of model and optimizer, each with whether it is frozen."""
        model = self._model()
        for parameter in model.parameters():
            yield parameter, not parameter.requires_grad
            for part in _quantised_parts(getattr(parameter, "quant_state", None)):
                yield part, True
        for buffer in model.buffers():
            yield buffer, False
        optimizer = self._optimizer()
        states = cast(dict[Tensor, dict[str, object]], optimizer.state) if optimizer is not None else {}
        for state in states.values():
            yield from ((value, False) for value in state.values() if isinstance(value, Tensor))

    def _copied(self, tensor: Tensor) -> Tensor:
        """The host copy of a frozen tensor, created when it is first moved."""
        kept = self._frozen.get(id(tensor))
        if kept is None or kept[0] is not tensor:
            kept = self._frozen[id(tensor)] = (tensor, self._to_host(tensor))
        return kept[1]

    def _to_host(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor.data, device="cpu", pin_memory=self._pinned)
        return copy.copy_(tensor.data)

    def _to_device(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor.data, device=self._device)
        return copy.copy_(tensor.data, non_blocking=self._pinned)


def _quantised_parts(state: Any) -> Iterator[Tensor]:
    if state is None:
        return
    parts = cast(dict[str, object], vars(state))
    for value in parts.values():
        if isinstance(value, Tensor):
            yield value
    yield from _quantised_parts(getattr(state, "state2", None))
