"""Moves the learner's weights, adapter and optimizer to host memory while the sampler uses the GPU, and back for a
step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


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
    """The quantisation scales of a 4-bit weight of bitsandbytes."""
    if state is None:
        return
    parts = cast(dict[str, object], vars(state))
    for value in parts.values():
        if isinstance(value, Tensor):
            yield value
    yield from _quantised_parts(getattr(state, "state2", None))
