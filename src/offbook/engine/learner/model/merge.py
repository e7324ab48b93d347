# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# transformers and peft carry partial types
"""Merges a base model and an adapter into one plain model folder."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from offbook.base.errors import ConfigError
from offbook.engine.base_weights import architecture_of, check_weights
from offbook.engine.precision import device_name, dtype_of


def merge(base: Path, adapter: Path, output: Path, dtype: torch.dtype) -> Path:
    """Write the merged model and its tokenizer to the new folder `output` and return its path.

    The folder is written under another name and renamed, so it is never incomplete. A copy of the base is loaded on the
    CPU, so a learner's weights stay unchanged. Raises ConfigError if `output` exists, OSError."""
    if output.exists():
        raise ConfigError(f"output: {output} exists already; name a new folder")
    check_weights(base)
    architecture = architecture_of(AutoConfig.from_pretrained(base, trust_remote_code=False))
    model = PeftModel.from_pretrained(
        architecture.from_pretrained(base, dtype=dtype, trust_remote_code=False), str(adapter)
    )
    merged = model.merge_and_unload()  # pyright: ignore[reportCallIssue]  # PEFT types it as a Tensor
    scratch = output.with_name(f".{output.name}.part-{os.getpid()}")
    try:
        merged.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(scratch)
        os.rename(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or half written and of no use
    return output


def main() -> int:
    """`python -m offbook.engine.learner.model.merge`: merge in the precision that a learner would have on this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m offbook.engine.learner.model.merge", description="Base plus adapter."
    )
    for name in ("--base", "--adapter", "--output"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    try:
        merge(arguments.base, arguments.adapter, arguments.output, dtype_of("auto", device_name("auto")))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
