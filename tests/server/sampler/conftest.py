"""A machine's GPUs by script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`driver(line, ...)` puts an nvidia-smi on the path that tells of these GPUs."""

    def install(*lines: str, code: int = 0, version: str = "580.65.06") -> None:
        program = tmp_path / "nvidia-smi"
        shown = "".join(f"echo '{line}'\n" for line in lines)
        asked = f'case "$*" in *driver_version*) echo {version}; exit {code};; esac\n'
        program.write_text(f"#!/bin/sh\n{asked}{shown}exit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install
