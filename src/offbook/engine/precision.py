"""What `--device` and `--dtype` stand for, in the sampler and in the learner."""

from __future__ import annotations

import logging

import torch

from offbook.base.devices import automatic_dtype, driver_fault, driver_version, gpus
from offbook.base.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def device_name(wanted: str) -> str:
    """`auto` takes cuda, then cpu, with a warning where there is a GPU that torch cannot use. Raises ConfigError for
    a word that names no device, and for a GPU that torch cannot use."""
    name = wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted!r}: one of auto, cpu, cuda, cuda:N, mps") from error
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {wanted}: {_unusable()}, or use --device cpu")
    if wanted == "auto" and name == "cpu" and gpus():
        logger.warning("This machine has a GPU, but the CPU is used: %s", _unusable())
    return name


def _unusable() -> str:
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install the CUDA build"
    driver = driver_version()
    if fault := driver_fault(cuda, driver):
        return f"torch {torch.__version__} cannot use a GPU, as {fault}: update the driver"
    return (
        f"torch {torch.__version__} (CUDA {cuda}) cannot use a GPU, with driver {driver or 'none'}: "
        "`python -c 'import torch; torch.cuda.init()'` says why; repair that"
    )


def dtype_of(wanted: str, device: str) -> torch.dtype:
    """`auto`: see `devices.automatic_dtype`. Raises ConfigError for a word that names no precision."""
    if wanted == "auto":
        on_cuda = device.startswith("cuda")
        wanted = automatic_dtype([torch.cuda.get_device_capability(device)] if on_cuda else [])
    if wanted not in _DTYPES:
        raise ConfigError(f"--dtype {wanted!r}: one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[wanted]
