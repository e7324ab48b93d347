"""Damage to a directory on which no server runs: one part of it cut, or bytes of it flipped."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offbook.engine import checkpoint_files

PARTS = ("checkpoint", "records", "state", "facts", "missing file", "missing records")


@dataclass(frozen=True)
class Damaged:
    """What was damaged. `named`: what `offbook verify` has to name; `step`: of a checkpoint."""

    part: str
    how: str
    model: str
    named: str
    step: int | None = None


def damage(folder: Path, part: str, chance: random.Random) -> Damaged | None:
    """Damage a part; None where there is none yet that the server could do without."""
    if part == "records":
        return _records(folder / "records.db", chance)
    if part == "missing records":
        for end in ("", "-wal", "-shm"):
            (folder / f"records.db{end}").unlink(missing_ok=True)
        return Damaged(part, "records.db is gone", "", f"{folder / 'records.db'}: ")
    models = sorted(path for path in (folder / "default" / "models").glob("*") if path.is_dir())
    newest = {path: checkpoint_files.steps(path / "checkpoints")[:1] for path in models}
    fit = [path for path in models if newest[path] and newest[path][0] > 1 and (path / "state.json").exists()]
    if not fit:
        return None
    model = chance.choice(fit)
    if part in ("checkpoint", "missing file"):
        step = newest[model][0]
        path = checkpoint_files.path_of(model / "checkpoints", step)
        if part == "missing file":
            file = path / chance.choice(checkpoint_files.FILES)
            file.unlink()
            return Damaged(part, f"{file.name} is gone", model.name, f"{path}: ", step)
        file = chance.choice(sorted(path.iterdir()))
        how = _bytes(file, chance, cut=file.name == checkpoint_files.NOTE)  # it holds the digests of the others only
        return Damaged(part, f"{file.name} {how}", model.name, f"{path}: ", step)
    file = model / ("state.json" if part == "state" else "model.json")
    how = _bytes(file, chance, cut=True)
    return Damaged(part, f"{file.name} {how}", model.name, f"{file}: ")


def _bytes(file: Path, chance: random.Random, *, cut: bool = False) -> str:
    """Cut a file, or flip one of its bytes."""
    content = bytearray(file.read_bytes())
    if cut or chance.random() < 0.4:
        keep = chance.randrange(len(content) - 2)
        file.write_bytes(content[:keep])
        return f"cut to {keep} of {len(content)} bytes"
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"with a bit flipped at {place} of {len(content)} bytes"


def _records(path: Path, chance: random.Random) -> Damaged:
    """The log is taken in first, so that what is damaged is the only copy. A row's own content has no checksum: pages
    that hold the tree are damaged, or the end is cut off."""
    with closing(sqlite3.connect(path)) as records:
        records.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (size,) = records.execute("PRAGMA page_size").fetchone()
        roots = [page for (page,) in records.execute("SELECT rootpage FROM sqlite_master WHERE rootpage > 1")]
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        keep = size * chance.randrange(2, len(content) // size - 1)
        path.write_bytes(content[:keep])
        how = f"cut to {keep} of {len(content)} bytes"
    else:
        page = chance.choice(roots)
        content[(page - 1) * size : page * size] = chance.randbytes(size)
        path.write_bytes(content)
        how = f"with page {page} overwritten"
    return Damaged("records", f"{path.name} {how}", "", f"{path}: ")
