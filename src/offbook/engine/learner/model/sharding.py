"""A base that is sharded over a team of learners: each holds a part of every layer, and all gather a layer while they
compute it (FSDP2, torch's `fully_shard`). The adapter, embeddings, head and final norm are whole on each learner.

A forward or backward pass of one learner therefore waits for the same pass of all others.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch's distributed package and transformers carry partial types.

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbook.base.errors import ConfigError

COLLECTIVE_SECONDS = 1800.0
"""How long a learner waits for the others in one pass. Between passes nobody waits, however long that is."""
LOOPBACK = "127.0.0.1"


def listen() -> socket.socket:
    """A socket at which the other learners find the first one. Loopback only: the store behind it checks no key."""
    listening = socket.create_server((LOOPBACK, 0))
    listening.set_inheritable(False)
    return listening


def join_group(rank: int, size: int, port: int, device: str, listening: socket.socket | None = None) -> None:
    """Meet the other learners: NCCL on GPUs, gloo on CPUs. `listening`: the first learner's socket, which is given away.
    Raises torch's DistError or RuntimeError if one does not come."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # else they may listen on the network
        os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
    waits = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # torch documents it there
        LOOPBACK,
        port,
        size,
        is_master=listening is not None,
        timeout=waits,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    on_gpu = device.startswith("cuda")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=waits,
        device_id=torch.device("cuda", 0) if on_gpu else None,
    )


def shard(model: PreTrainedModel, device: str) -> None:
    """Leave this learner's part of each decoder layer on `device`, and all else whole. The weights come there from host
    memory layer by layer. Raises ConfigError for a base without a list of layers."""
    decoder = cast(nn.Module, model.get_decoder())
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"shard: base model {model.config.model_type!r} has no list of layers to divide: leave out --shard, or "
            "choose another base model"
        )
    model.requires_grad_(False)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    whole = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # the root, which gathers a layer ahead
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]  # a decorator hides the signature


def held_weights(model: nn.Module) -> int:
    """Number of frozen weights that this learner holds between passes."""
    frozen = (value for value in model.parameters() if not value.requires_grad)
    return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in frozen)
