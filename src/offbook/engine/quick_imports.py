"""Imports of torch, transformers and PEFT at the start of an engine's process, a third faster than as they stand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from offbook.base.json_files import read_json

QUANTIZERS = ("bitsandbytes", "torchao")


@contextmanager
def quick_imports(base: Path, *, quantizers: bool = False) -> Generator[None]:
    """Import and load within this block without garbage collections, which find nothing there, and without quantizers.

    transformers and PEFT import every quantizer that is installed. `quantizers`: they are needed; they are too if the
    files in the folder `base` are quantized."""
    modules = cast(dict[str, ModuleType | None], sys.modules)
    hidden = [] if quantizers or _is_quantized(base) else [name for name in QUANTIZERS if name not in modules]
    modules |= dict.fromkeys(hidden)  # Python's way to say that a module cannot be imported
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for name in hidden:
            del modules[name]


def _is_quantized(base: Path) -> bool:
    try:
        config = read_json(base / "config.json")
    except (OSError, ValueError):  # told when the base is loaded
        return False
    return isinstance(config, dict) and "quantization_config" in config
