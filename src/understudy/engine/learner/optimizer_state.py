"""AdamW's state by the names of the adapter's parameters: as checkpoints hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UnderstudyError


def state_tensors(optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state by `{parameter name}|{field}`, on the CPU."""
    return {
        f"{name}|{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_state(
    optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `state_tensors`. Raises UnderstudyError when a tensor belongs to no parameter."""
    for place, tensor in tensors.items():
        name, _, key = place.rpartition("|")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and tensor.shape != parameter.shape):
            raise UnderstudyError(
                f"the saved optimizer state {place!r} {tuple(tensor.shape)} fits no adapter parameter"
            )
        optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)
