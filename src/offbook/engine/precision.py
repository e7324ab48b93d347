"""What `--device` and `--dtype` stand for, in the sampler and in the learner."""

from __future__ import annotations

import torch

from offbook.base.devices import automatic_dtype
from offbook.base.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def device_name(wanted: str) -> str:
    """`auto` takes cuda, then cpu. Raises ConfigError for a word that names no device."""
    name = wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted!r}: one of auto, cpu, cuda, cuda:N, mps") from error
    return name


def dtype_of(wanted: str, device: str) -> torch.dtype:
    """`auto`: see `devices.automatic_dtype`. Raises ConfigError for a word that names no precision."""
    if wanted == "auto":
        on_cuda = device.startswith("cuda")
        wanted = automatic_dtype([torch.cuda.get_device_capability(device)] if on_cuda else [])
    if wanted not in _DTYPES:
        raise ConfigError(f"--dtype {wanted!r}: one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]
