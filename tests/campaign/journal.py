"""Where clients and programs of a campaign write what they were answered."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Journal:
    """Lines of JSON, each one write to the end of a file: a killed process leaves whole lines."""

    path: Path
    file: int = -1

    def __post_init__(self) -> None:
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, kind: str, **fields: Any) -> None:
        os.write(self.file, (json.dumps({"kind": kind} | fields) + "\n").encode())
