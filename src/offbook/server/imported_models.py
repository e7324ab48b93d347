"""Makes a model of a PEFT LoRA that another tool trained, in a directory on which no server runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.types import Json

from ..engine.checkpoint_files import ADAPTER_CONFIG, make_folder, path_of, read, sync
from ..engine.protocol import IMPORT_MODULE
from .directory_lock import DirectoryLock, make_private
from .maintenance import RECORDS
from .models.base_model import BaseModelPath, find
from .models.checkpoints import ModelFacts, base_name, scan_models, write_facts
from .records.sqlite_file import fault_of
from .records.store import create_file


def named_base(adapter: Path) -> str | None:
    """The base that the adapter's configuration names; None without one. Raises ConfigError for an unreadable file."""
    try:
        named: Json = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{adapter / ADAPTER_CONFIG} cannot be read: {error}") from error
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path: a name is needed, got {named!r:.100}")
    return named or None


def import_model(
    root: Path, adapter: Path, model: str, project: str, base_model: str, *, own_records: bool = True
) -> Path:
    """Create `model` with the adapter as its step 1, and return the checkpoint's folder. The base is loaded in a process
    of its own. `own_records`: whether the server keeps its records in the directory. Raises ConfigError for a name that is
    taken, a running server, and an adapter that does not fit the base."""
    base = find(base_model)
    make_private(root)
    lock = DirectoryLock(root)
    try:
        if any(facts.name == model for _, facts in scan_models(root)):
            raise ConfigError(f"there is a model {model!r} in {root} already: use another --model")
        records = root / RECORDS
        if own_records and not records.exists() and fault_of(records, None) is None:
            create_file(records)  # a server takes checkpoints without records for a loss
        return _imported(root / project / "models" / model, adapter, model, project, base)
    finally:
        lock.release()


def _imported(folder: Path, adapter: Path, model: str, project: str, base: BaseModelPath) -> Path:
    make_folder(folder.parent)
    scratch = folder.with_name(f".fork-{folder.name}")  # a start removes what a kill leaves
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        places = {"base": base.path, "adapter": adapter, "checkpoints": scratch / "checkpoints"}
        words = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        done = subprocess.run(
            [sys.executable, "-m", IMPORT_MODULE, "--name", base.reference, "--model", model, *words],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with code {done.returncode}"]
            raise ConfigError(f"{adapter} was not imported: {done.stdout or last[0]}")
        note = read(path_of(scratch / "checkpoints", 1)).note
        write_facts(scratch, ModelFacts(name=model, project=project, base_model=base_name(note), lora=note.lora))
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path_of(folder / "checkpoints", 1)
