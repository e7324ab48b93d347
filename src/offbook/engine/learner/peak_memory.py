"""What a step takes of a CUDA device, as torch and the driver count it, for comparison with the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class MemoryReading:
    """Bytes. Of this process since `reset`: the peak of its tensors (`peak`) and of what torch held for them (`held_peak`),
    and what it holds now (`held`). Of the device, all processes together: `free` now, and `total`."""

    peak: int
    held_peak: int
    held: int
    free: int
    total: int


def reset(device: torch.device) -> None:
    """Count peaks from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read(device: torch.device) -> MemoryReading | None:
    """None where torch counts no peaks: on a CPU, and on Apple's GPUs."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return MemoryReading(
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        torch.cuda.memory_reserved(device),
        free,
        total,
    )


def memory_metrics(reading: MemoryReading | None) -> dict[str, float]:
    """GiB. The device's peak is what it holds now, and what torch held more at this process's own peak."""
    if reading is None:
        return {}
    used = reading.total - reading.free + reading.held_peak - reading.held
    return {
        "memory/learner_peak": reading.peak / GIB,
        "memory/learner_held": reading.held_peak / GIB,
        "memory/gpu_peak": used / GIB,
    }
