"""Imports of torch, transformers and PEFT at the start of an engine's process, quicker than as they stand."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn, cast

from offbook.base.json_files import read_json

QUANTIZERS = ("bitsandbytes", "torchao")
_UNUSED = ("boto3",)
"""Imported by accelerate for a configuration that no engine has."""


@contextmanager
def quick_imports(base: Path, *, quantizers: bool = False) -> Generator[None]:
    """Import and load within this block. What it imports stays out of all later garbage collections.

    No collection runs in it, since imports leave nothing to collect. transformers and PEFT import every quantizer that
    is installed: here they find none. `quantizers`: they are needed; they are too if the files in the folder `base` are
    quantized.
    """
    modules = cast(dict[str, ModuleType | None], sys.modules)
    needed = quantizers or _is_quantized(base)
    hidden = [name for name in (_UNUSED if needed else (*QUANTIZERS, *_UNUSED)) if name not in modules]
    modules |= dict.fromkeys(hidden)  # Python's way to say that a module cannot be imported
    gc.disable()
    try:
        if not needed:  # Unsloth, which needs them, wants to be imported first
            importlib.import_module("transformers.modeling_utils")
        gc.freeze()  # hundreds of thousands of objects, which every full collection would look through
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
        for name in hidden:
            del modules[name]


def leave_with(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `main`, without the interpreter's clean-up.

    The clean-up would not collect what `quick_imports` froze, which triton's library takes for leaks: 30 lines in the
    log."""
    try:
        code = main()
    except SystemExit as end:  # of argparse, or of a signal's handler
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _is_quantized(base: Path) -> bool:
    try:
        config = read_json(base / "config.json")
    except (OSError, ValueError):  # told when the base is loaded
        return False
    return isinstance(config, dict) and "quantization_config" in config
