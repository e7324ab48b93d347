"""Converts AdamW's state to named tensors for a checkpoint, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from offbook.base.errors import OffbookError


def state_tensors(optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state as CPU tensors named `{parameter name}|{field}`."""
    return {
        f"{name}|{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_state(
    optimizer: torch.optim.AdamW, parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """The inverse of `state_tensors`. Raises OffbookError when a tensor belongs to no parameter."""
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("|")
        parameter = parameters.get(name)
        if parameter is None or (key != "step" and tensor.shape != parameter.shape):
            raise OffbookError(
                f"the saved optimizer state {full_name!r} {tuple(tensor.shape)} fits no adapter parameter"
            )
        optimizer.state[parameter][key] = tensor if key == "step" else tensor.to(parameter.device)
