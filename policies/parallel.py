"""Gradients of several batches at once, with one thread per batch. Threads inside one operation wait for each other at
every operation, which is slow on a machine that is busy with other work."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch carries partial types.

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import nn

Work = TypeVar("Work")
Module = TypeVar("Module", bound=nn.Module)


class Replicas(Generic[Module]):
    """Copies of a module, one per thread. They share the module's parameters; each has its own gradients."""

    def __init__(self, module: Module, count: int) -> None:
        self._modules = [module] + [_twin(module) for _ in range(count - 1)]
        self._pool = ThreadPoolExecutor(count)

    def accumulate(self, loss: Callable[[Module, Work], torch.Tensor], works: Sequence[Work]) -> float:
        """Add the gradient of the mean loss over `works` to the module's gradients. Returns that mean. At most `count`
        works are used, one per copy."""
        jobs = list(zip(self._modules, works, strict=False))

        def gradient(job: tuple[Module, Work]) -> float:
            part = loss(*job) / len(jobs)
            part.backward()
            return float(part.detach())

        losses = list(self._pool.map(gradient, jobs))
        own = list(self._modules[0].parameters())
        for module, _ in jobs[1:]:
            for mine, theirs in zip(own, module.parameters(), strict=True):
                if theirs.grad is not None:
                    mine.grad = theirs.grad if mine.grad is None else mine.grad.add_(theirs.grad)
                    theirs.grad = None
        return sum(losses)

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks in parallel and wait for all. Raises the first error."""
        for done in [self._pool.submit(task) for task in tasks]:
            done.result()

    def train(self, training: bool) -> None:
        """Set the training mode of all copies."""
        for module in self._modules:
            module.train(training)


def _twin(module: Module) -> Module:
    twin = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.data = mine.data
    return twin
