"""Summarises why rollouts failed: exceptions counted by kind, with one traceback per kind."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path

from offbook.base.types import RolloutException, TrajectoryGroup

SHORT_MESSAGE, LONG_MESSAGE = 60, 1000
"""Characters of a message: in the line that a training step prints, and in an error."""
SHORT_KINDS, LONG_KINDS = 3, 5
"""Kinds listed: in the line of a step, and in an error."""
TRACEBACK_LINES = 40
_COMPARED = 2_000
"""Characters of a message that tell kinds apart: `_VARYING` takes time with the square of their number."""
OUR_OWN = frozenset({"RolloutError", "TimeoutError"})
"""Exception types whose message is enough, without the line that raised them."""

_VARYING = re.compile(
    r"(?<!\w)'[^']*'(?!\w)"
    r'|(?<!\w)"[^"]*"(?!\w)'
    r"|\{.*\}|\[.*\]"
    r"|\b0x[0-9a-fA-F]+\b"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|\d+(?:\.\d+)?"
)
"""Parts that vary between messages of one cause: quoted values, JSON, addresses, ids, numbers."""
_FRAME = re.compile(r'^(?P<indent>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


@dataclass(frozen=True)
class FailureKind:
    """Rollouts that failed alike: same exception type, same line of the app, same message except for parts that vary.

    The message shows `…` where it varied. `place` is like `app.py:31`, and empty when the traceback has no line of the app.
    `traceback` is an example without the frames of libraries.
    """

    type: str
    message: str
    place: str = ""
    count: int = 1
    traceback: str = field(default="", repr=False)

    def line(self, length: int = SHORT_MESSAGE) -> str:
        """One line such as `2 x KeyError: 'city' at app.py:31`, the message cut to `length` characters."""
        message = self.message if len(self.message) <= length else f"{self.message[: length - 1]}…"
        cause = ": ".join(part for part in (self.type, message) if part)
        return f"{self.count} x {cause}" + (f" at {self.place}" if self.place else "")

    @property
    def key(self) -> tuple[str, str, str]:
        """Type, message without its varying parts, and place: equal for failures of one kind."""
        return self.type, _VARYING.sub("…", self.message[:_COMPARED]), self.place


def failures(groups: Iterable[TrajectoryGroup]) -> list[RolloutException]:
    """The exceptions of all failed rollouts of the groups."""
    errors: list[RolloutException] = []
    for group in groups:
        errors += [*group.exceptions, *(rollout.exception for rollout in group if rollout.exception is not None)]
    return errors


def failure_kinds(errors: Iterable[RolloutException]) -> tuple[FailureKind, ...]:
    """Count the exceptions by kind, the most frequent first."""
    return merged(
        FailureKind(
            error.type, " ".join(error.message.split())[:LONG_MESSAGE], _place(error), traceback=_own_traceback(error)
        )
        for error in errors
    )


def merged(kinds: Iterable[FailureKind]) -> tuple[FailureKind, ...]:
    """Merge kinds with equal keys, the most frequent first."""
    by_key: dict[tuple[str, str, str], FailureKind] = {}
    for kind in kinds:
        known = by_key.get(kind.key)
        if known is not None:
            message = kind.message if kind.message == known.message else kind.key[1]
            kind = replace(known, count=known.count + kind.count, message=message)
        by_key[kind.key] = kind
    return tuple(sorted(by_key.values(), key=lambda kind: -kind.count))


def summary(kinds: Sequence[FailureKind], shown: int = SHORT_KINDS, length: int = SHORT_MESSAGE) -> str:
    """One line: `2 x KeyError: 'city' at app.py:31; 1 x ValueError: no luck at app.py:40`."""
    lines = [kind.line(length) for kind in kinds[:shown]]
    if rest := kinds[shown:]:
        lines.append(f"{sum(kind.count for kind in rest)} more of {len(rest)} other kinds")
    return "; ".join(lines)


def details(kinds: Sequence[FailureKind]) -> str:
    """The summary with longer messages, followed by a traceback per kind."""
    tracebacks = [kind.traceback for kind in kinds[:LONG_KINDS] if kind.traceback]
    return "\n".join([summary(kinds, LONG_KINDS, LONG_MESSAGE), *tracebacks])


def _place(error: RolloutException) -> str:
    """The innermost line of the app in a traceback; empty if there is none, or for a type in OUR_OWN."""
    if error.type in OUR_OWN:
        return ""
    frames = [frame for frame in _FRAME.finditer(error.traceback) if is_app_file(frame["file"])]
    return f"{Path(frames[-1]['file']).name}:{frames[-1]['line']}" if frames else ""


def _own_traceback(error: RolloutException) -> str:
    """The traceback reduced to the app's frames, or to the last frame if none is the app's; empty for a RolloutError."""
    lines = error.traceback.splitlines()
    frames = {index: frame for index, line in enumerate(lines) if (frame := _FRAME.match(line))}
    if not frames or error.type == "RolloutError":
        return ""
    own = {index for index, frame in frames.items() if is_app_file(frame["file"])} or {max(frames)}
    kept: list[str] = []
    indent, shown = None, True
    for index, line in enumerate(lines):
        if index in frames:
            indent, shown = frames[index]["indent"], index in own
        elif indent is None or not line.startswith((f"{indent}  ", f"{indent}[Previous line")):
            indent, shown = None, True  # after the frames: the exception's message
        if shown:
            kept.append(line)
    return "\n".join(line[:LONG_MESSAGE] for line in kept[-TRACEBACK_LINES:])


PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages in a usual environment."""
_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        _PACKAGE,
        _PACKAGE.parents[1] / "integrations",  # of a checkout
    )
)


@functools.cache
def is_app_file(file: str) -> bool:
    """Whether a source file belongs to the app.

    Packages may lie anywhere on `sys.path`: `pip install --target`, a Lambda layer, a zip. They are known by the metadata
    beside them, and a folder may hold both the app and packages. An app in editable mode is the app's own.
    """
    if file.startswith("<") or PACKAGES.intersection(Path(file).parts):
        return False
    resolved = os.path.realpath(file)
    if resolved.startswith(_LIBRARIES):
        return False
    for entry in sys.path:
        root = os.path.realpath(entry or os.curdir) + os.sep
        if resolved.startswith(root) and resolved.removeprefix(root).split(os.sep)[0] in _installed(root):
            return False
    return True


@functools.cache
def _installed(root: str) -> frozenset[str]:
    return frozenset(
        path.parts[0]
        for distribution in distributions(path=[root.rstrip(os.sep)])
        if distribution.read_text("RECORD") is not None  # a build of the app leaves an egg-info, without one
        for path in distribution.files or ()
    )
