"""Makes a PEFT LoRA of another tool step 1 of a new model. A process of its own loads the base and compares the layers.

Not in `checkpoints`, which commands read without numpy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from offbook.base.child_processes import last_line
from offbook.base.errors import ConfigError

from ...engine.checkpoint_files import make_folder, path_of, read, sync
from ...engine.protocol import IMPORT_MODULE
from ..base_model import BaseModelPath
from .checkpoints import ModelFacts, base_name, write_facts


def import_adapter(folder: Path, adapter: Path, model: str, project: str, base: BaseModelPath) -> None:
    """Create the model's `folder`, atomically. Raises ConfigError for an adapter that does not fit the base, OSError."""
    make_folder(folder.parent)
    scratch = folder.with_name(f".fork-{folder.name}")  # a start removes what a kill leaves
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        places = {"base": base.path, "adapter": adapter, "checkpoints": scratch / "checkpoints"}
        words = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        done = subprocess.run(
            [sys.executable, "-m", IMPORT_MODULE, "--name", base.reference, "--model", model, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            last = last_line(done.stderr) or f"the process ended with code {done.returncode}"
            raise ConfigError(f"{adapter} was not imported: {done.stdout or last}")
        note = read(path_of(scratch / "checkpoints", 1)).note
        write_facts(scratch, ModelFacts(name=model, project=project, base_model=base_name(note), lora=note.lora))
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
