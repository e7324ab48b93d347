# pyright: reportUnknownMemberType=false
# torch's own annotations are partial
"""Which device and which precision `auto` stands for."""

from __future__ import annotations

import torch


def device_name(asked: str) -> str:
    """`auto` takes cuda, then cpu."""
    return asked if asked != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(asked: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 on cuda, float16 where the GPU is older than Ampere and has none, else float32."""
    if asked == "auto":
        if not device.startswith("cuda"):
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }[asked]
