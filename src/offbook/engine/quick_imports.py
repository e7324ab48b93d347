"""Imports of torch, transformers and PEFT at the start of an engine's process, quicker than as they stand."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import metadata
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
    slow = metadata.packages_distributions
    metadata.packages_distributions = packages_distributions
    try:
        if not needed:  # Unsloth, which needs them, wants to be imported first
            importlib.import_module("transformers.modeling_utils")
        gc.freeze()  # hundreds of thousands of objects, which every full collection would look through
        yield
        gc.collect()
        gc.freeze()
    finally:
        metadata.packages_distributions = slow
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


def packages_distributions() -> dict[str, list[str]]:
    """`importlib.metadata.packages_distributions`, which transformers calls when it is imported, in a seventh of its time.

    It reads the same files, as text: no path object for each file, no e-mail parser for the names.
    """
    packages: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in metadata.distributions():
        _, _, name = (distribution.read_text("METADATA") or "").partition("\nName: ")
        declared = distribution.read_text("top_level.txt")
        for package in declared.split() if declared else _packages(distribution.read_text("RECORD") or ""):
            packages[package].append(name.partition("\n")[0] or distribution.metadata["Name"])
    return dict(packages)


def _packages(record: str) -> set[str]:
    """The importable names of the files that a RECORD lists, a line each: a path, then its hash and size."""
    names: set[str | None] = set()
    for line in record.splitlines():
        first, inside, _ = line.partition(",")[0].partition("/")
        names.add(first if inside else inspect.getmodulename(first))
    return {name for name in names if name and "." not in name}


def _is_quantized(base: Path) -> bool:
    try:
        config = read_json(base / "config.json")
    except (OSError, ValueError):  # told when the base is loaded
        return False
    return isinstance(config, dict) and "quantization_config" in config
