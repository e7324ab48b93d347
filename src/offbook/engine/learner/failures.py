"""Classifies a failure for the server: one of the reasons of protocol.Failed, and a message that says what to do."""

from __future__ import annotations

import errno
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from offbook.base.errors import ConfigError, EngineError, NotFiniteError, StoreError, TrainError
from offbook.base.terminal import echo

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


@dataclass(frozen=True)
class Memory:
    """The context of an out-of-memory message: the device, whether the base is in 4 bits, and whether it is being
    loaded."""

    device: str = "cpu"
    four_bit: bool = False
    loading: bool = False


def describe_failure(error: Exception, place: Path, memory: Memory = Memory()) -> tuple[str, str]:
    """(reason, message) of a failure. `place`: the folder that the command writes to. The traceback of an unexpected
    failure is printed to the log."""
    if isinstance(error, TrainError):
        return error.reason, str(error)
    if isinstance(error, ConfigError):
        return "bad_job", str(error)
    if isinstance(error, NotFiniteError):
        return "nan_gradient", str(error)
    if _is_out_of_memory(error):
        return "out_of_memory", _out_of_memory(error, memory)
    if _is_disk_full(error):
        where = getattr(error, "filename", None) or place
        return (
            "disk_full",
            f"no space left while writing {where}: the step was not applied. Free space and send it again ({error})",
        )
    if isinstance(error, EngineError | StoreError):
        return "failed", str(error)
    echo("".join(traceback.format_exception(error)), err=True, nl=False)
    return "failed", f"{type(error).__name__}: {error} (traceback in the learner's log)"


def _out_of_memory(error: Exception, memory: Memory) -> str:
    on_gpu = memory.device.startswith("cuda")
    advice: list[str] = []
    if not memory.loading:
        advice.append("lower row_tokens in the train config (tokens of one forward and backward), then logits_chunk")
    if on_gpu and not memory.four_bit:
        advice.append("hold the base in 4 bits (load_in_4bit, --load-in-4bit)")
    if on_gpu:
        advice.append(
            "where vLLM shares this GPU, leave it less (engine_args, --engine-args '{\"gpu-memory-utilization\": 0.4}'), or "
            "give each its own (inference_gpus, train_gpus)"
        )
    if not memory.loading:
        advice.append("split the request into smaller ones")
    elif not on_gpu:
        advice.append("choose a smaller base model, or --dtype bfloat16, which takes half of float32's memory")
    when = " while it loaded the base" if memory.loading else "; the step was not applied"
    return f"the learner ran out of memory{when}. To mend it: {'; or '.join(advice)} ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    if isinstance(error, SafetensorError):  # its message contains the errno
        match = re.search(r"os error (\d+)", str(error))
        return match is not None and int(match.group(1)) in _FULL
    return False
