"""A disk that loses its power: what `recorder.c` noted is played back, and at any moment what was not synced is dropped.

POSIX promises little: without fsync of a file its bytes may be on the disk in any part, without fsync of a folder each of its
names may be as it is now or as it was at the last. Three images of each moment: everything that was not synced is lost; the
names are there and the bytes are not; and a seeded mixture, writes torn at sectors.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RECORDER = Path(__file__).with_name("recorder.c")
ACKS = ".acks"
"""What a writer writes to this file below its root was acknowledged to somebody at that moment."""
SECTOR = 512
KINDS = ("nothing unsynced", "names without bytes", "torn")


@dataclass(frozen=True)
class Operation:
    """One change: `data` was written at `place`; a truncate is to `place` bytes."""

    name: str
    place: int
    path: str
    other: str
    data: bytes


@dataclass(eq=False)
class Node:
    """A file or folder: as the system shows it, and as it was when it was synced last."""

    folder: bool
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[Operation] = field(default_factory=list[Operation])
    entries: dict[str, Node] = field(default_factory=dict[str, "Node"])
    synced_entries: dict[str, Node] = field(default_factory=dict[str, "Node"])

    def sync(self) -> None:
        self.synced, self.pending = bytes(self.content), []
        self.synced_entries = dict(self.entries)


class Disk:
    """The files below a root after some operations; `acks` holds what was acknowledged until then."""

    def __init__(self, root: Path) -> None:
        self.root = Node(folder=True)
        self.acks: list[str] = []
        self._prefix = str(root)

    def apply(self, operation: Operation) -> None:
        if operation.path.endswith(ACKS):
            self.acks += operation.data.decode().split()
            return
        folder, name = self._place(operation.path)
        match operation.name:
            case "create" | "mkdir":
                folder.entries[name] = Node(folder=operation.name == "mkdir")
            case "remove":
                del folder.entries[name]
            case "rename":
                target, new = self._place(operation.other)
                target.entries[new] = folder.entries.pop(name)
            case "sync":
                (folder.entries[name] if name else self.root).sync()
            case _:
                node = folder.entries[name]
                change(node.content, operation)
                node.pending.append(operation)

    def _place(self, path: str) -> tuple[Node, str]:
        """The folder that holds a path, and the name there; an empty one for the root."""
        *parents, name = path.removeprefix(self._prefix).strip("/").split("/")
        node = self.root
        for parent in parents:
            node = node.entries[parent]
        return node, name

    def image(self, kind: str, folder: Path, chance: random.Random) -> None:
        """Write to a new folder what is left after a loss of power at this moment."""
        _write(self.root, kind, folder, chance)


def change(content: bytearray, operation: Operation) -> None:
    """Write or truncate a file's bytes."""
    content.extend(bytes(max(0, operation.place - len(content))))
    if operation.name == "truncate":
        del content[operation.place :]
    else:
        content[operation.place : operation.place + len(operation.data)] = operation.data


def _write(node: Node, kind: str, path: Path, chance: random.Random) -> None:
    if not node.folder:
        path.write_bytes(node.synced if kind != "torn" else _torn(node, chance))
        return
    path.mkdir()
    names = dict(node.synced_entries if kind == "nothing unsynced" else node.entries)
    if kind == "torn":
        either = {name: (node.synced_entries.get(name), node.entries.get(name)) for name in names | node.synced_entries}
        names = {name: kept for name, both in either.items() if (kept := chance.choice(both)) is not None}
    for name, child in names.items():
        _write(child, kind, path / name, chance)


def _torn(node: Node, chance: random.Random) -> bytearray:
    """Of what was not synced, some sectors: each as it was written, or not at all."""
    content = bytearray(node.synced)
    for operation in node.pending:
        if operation.name == "truncate":
            if chance.random() < 0.5:
                change(content, operation)
            continue
        for start in range(0, len(operation.data), SECTOR):
            if chance.random() < 0.5:
                data = operation.data[start : start + SECTOR]
                change(content, Operation("write", operation.place + start, "", "", data))
    return content


# ---- recording


def recorder(folder: Path) -> Path:
    """The recorder, compiled. Needs a C compiler."""
    library = folder / "recorder.so"
    words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(RECORDER), "-lpthread"]
    subprocess.run(words, check=True)
    return library


def recorded(library: Path, folder: Path, *words: str) -> tuple[Path, list[Operation]]:
    """Run `python -m tests.power_loss.writers ROOT words...`; its root, and what it did there."""
    root, log = folder / "root", folder / "operations"
    root.mkdir()
    (root / ACKS).touch()
    environment = {"POWER_LOSS_ROOT": str(root), "POWER_LOSS_LOG": str(log), "LD_PRELOAD": str(library)}
    argv = ["env", *(f"{name}={value}" for name, value in environment.items())]
    argv += [sys.executable, "-m", "tests.power_loss.writers", str(root), *words]
    subprocess.run(argv, check=True)
    return root, list(_operations(log.read_bytes()))


def _operations(text: bytes) -> Iterator[Operation]:
    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        name, size, place, path, other = text[at:end].decode().split("\t")
        at = end + 1 + int(size)
        yield Operation(name, int(place), path, other, text[end + 1 : at])


def losses(
    root: Path, operations: list[Operation], scratch: Path, *, moments: int, seed: int
) -> Iterator[tuple[str, Path, list[str]]]:
    """Images of the disk after a loss of power, one at a time, at `moments` of the operations and always around each sync
    and rename: what is said of it, its folder, and what was acknowledged until then."""
    chance = random.Random(seed)
    telling = {at + step for at, each in enumerate(operations) if each.name in ("sync", "rename") for step in (0, 1)}
    shown = [at for at, each in enumerate(operations) if not each.path.endswith("-shm")]
    chosen = telling | set(chance.sample(shown, min(moments, len(shown)))) | {len(operations)}
    if len(telling) > moments:
        chosen = set(chance.sample(sorted(telling), moments)) | {len(operations)}
    disk = Disk(root)
    for at in range(len(operations) + 1):
        if at in chosen:
            for kind in KINDS:
                image = scratch / "image"
                shutil.rmtree(image, ignore_errors=True)
                disk.image(kind, image, chance)
                yield f"after {at} of {len(operations)} operations, {kind}", image, list(disk.acks)
        if at < len(operations):
            disk.apply(operations[at])
