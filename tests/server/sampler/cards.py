"""GPUs as lines of nvidia-smi: `H100.format(index=0, free=60 * GIB)`."""

from __future__ import annotations

GIB = 1024  # MiB
H100 = "{index}, NVIDIA H100, 81920, {free}, 9.0, GPU-{index}a2b"
L4 = "{index}, NVIDIA L4, 23034, {free}, 8.9, GPU-{index}e4f"
T4 = "{index}, Tesla T4, 15360, {free}, 7.5, GPU-{index}c3d"
