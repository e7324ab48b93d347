"""Text and JSON in files that users and other programs may have written."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import ConfigError
from .types import Json


def read_text(file: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigError, also for a folder or a pipe, which would be read without end."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} cannot be read: no regular file")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def read_json(file: Path) -> Json:
    """The JSON of a UTF-8 file, with or without a byte order mark.

    Raises OSError, and ValueError for whatever is not JSON, also for other bytes and too deep nesting.
    """
    try:
        return json.loads(file.read_text("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
