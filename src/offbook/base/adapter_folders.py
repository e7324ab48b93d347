"""Folders with a PEFT adapter, such as a LoRA that another tool trained, named where a base model is named."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError
from .json_files import read_json
from .types import Json

CONFIG = "adapter_config.json"


def adapter_folder(name: str) -> Path | None:
    """The absolute folder if `name` is the path of an adapter; None for whatever else names a base."""
    try:
        folder = Path(name).expanduser()
        is_adapter = (folder / CONFIG).is_file() and not (folder / "config.json").exists()
        return folder.absolute() if is_adapter else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, with a NUL character, or of no known user
        return None


def named_base(adapter: Path) -> str | None:
    """The base that the adapter's configuration names; None without one. Raises ConfigError for an unreadable file."""
    try:
        named: Json = read_json(adapter / CONFIG).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{adapter / CONFIG} cannot be read: {error}") from error
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{adapter / CONFIG}: base_model_name_or_path: a name is needed, got {named!r:.100}")
    return named or None
