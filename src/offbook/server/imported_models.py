"""Makes a model of a PEFT LoRA that another tool trained, in a directory on which no server runs."""

from __future__ import annotations

from pathlib import Path

from offbook.base.errors import ConfigError

from ..engine.checkpoint_files import path_of
from .directory_lock import DirectoryLock, make_private
from .maintenance import RECORDS
from .models.adapter_import import import_adapter
from .models.base_model import find
from .models.checkpoints import scan_models
from .records.database import fault_of
from .records.store import create_file


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
        folder = root / project / "models" / model
        import_adapter(folder, adapter, model, project, base)
        return path_of(folder / "checkpoints", 1)
    finally:
        lock.release()
