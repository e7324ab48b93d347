"""`python -m offbook.engine.import_check torch|vllm|unsloth`: imports that package, and prints what it says of this machine
as one JSON object. For processes that import none of them; what is broken ends with Python's own error on stderr."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable

import torch

from offbook.base.devices import driver_version, gpus, has_bfloat16

from .learner.model.unsloth_loader import vllm_extensions_hidden

_SETTINGS = {"UNSLOTH_DISABLE_STATISTICS": "1", "VLLM_NO_USAGE_STATS": "1"}


def torch_facts() -> dict[str, object]:
    """Version, what it was built for, the devices it can use, and the GPUs that the driver knows."""
    return {
        "version": torch.__version__,
        "build": _build(),
        "threads": torch.get_num_threads(),
        "devices": [_cuda(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "mps": torch.backends.mps.is_available(),
        "driver_gpus": [gpu.name for gpu in gpus()],
        "driver": driver_version(),
    }


def vllm_facts() -> dict[str, object]:
    """What is started as the sampler can be imported, on which platform."""
    importlib.import_module("vllm.entrypoints.openai.api_server")
    platform = importlib.import_module("vllm.platforms").current_platform
    return {"platform": str(platform.device_type)}


def unsloth_facts() -> dict[str, object]:
    """What loads the base for the learner can be imported, for which kind of device."""
    with vllm_extensions_hidden():
        importlib.import_module("unsloth")
    return {"platform": "cuda" if torch.cuda.is_available() else "cpu"}


def _build() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"


def _cuda(index: int) -> dict[str, object]:
    """One GPU; memory in bytes."""
    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "total": total,
        "free": free,
        "capability": f"{major}.{minor}",
        "bfloat16": has_bfloat16((major, minor)),
    }


SUBJECTS: dict[str, Callable[[], dict[str, object]]] = {
    "torch": torch_facts,
    "vllm": vllm_facts,
    "unsloth": unsloth_facts,
}


def main(argv: list[str]) -> int:
    """Prints the facts; whatever the packages print goes to stderr."""
    if len(argv) != 1 or argv[0] not in SUBJECTS:
        print(f"one of {', '.join(SUBJECTS)} is needed, got {argv}", file=sys.stderr)
        return 2
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        answer.write(json.dumps(SUBJECTS[argv[0]]()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
