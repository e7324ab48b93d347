"""Why rollouts failed: their exceptions counted by kind, with one traceback for each kind."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..types import RolloutException, TrajectoryGroup

SHORT_MESSAGE, LONG_MESSAGE = 60, 1000
"""Characters of a message in a step's line, and in an error."""
SHORT_KINDS, LONG_KINDS = 3, 5
TRACEBACK_LINES = 40
LIBRARIES = tuple(
    str(path) + os.sep
    for folder in (
        Path(sysconfig.get_path("stdlib")),
        Path(__file__).parents[1],
        Path(__file__).parents[3] / "integrations",
    )
    for path in {folder, folder.resolve()}
)
"""With everything in site-packages: code that is not the app's."""
OUR_OWN = frozenset({"RolloutError", "TimeoutError"})
"""Errors whose message says what to do, wherever they were raised."""

_VARYING = re.compile(
    r"(?<!\w)'[^']*'(?!\w)"
    r'|(?<!\w)"[^"]*"(?!\w)'
    r"|\{.*\}|\[.*\]"
    r"|\b0x[0-9a-fA-F]+\b"
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|\d+(?:\.\d+)?"
)
"""What differs between messages of one cause: quoted values, JSON, addresses, ids, numbers."""
_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class FailureKind:
    """Rollouts that failed alike: by an exception of the same type, at the same line of the app, with the same message
    but for the parts that vary (`…` where they did). `place` is `app.py:31`, empty where no line is the app's; `traceback`
    is that of one of them, without the frames of libraries."""

    type: str
    message: str
    place: str = ""
    count: int = 1
    traceback: str = field(default="", repr=False)

    def line(self, length: int = SHORT_MESSAGE) -> str:
        """`2 x KeyError: 'city' at app.py:31`."""
        message = self.message if len(self.message) <= length else f"{self.message[: length - 1]}…"
        cause = ": ".join(part for part in (self.type, message) if part)
        return f"{self.count} x {cause}" + (f" at {self.place}" if self.place else "")

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for failures of one kind."""
        return self.type, _VARYING.sub("…", self.message), self.place


def failures(groups: Iterable[TrajectoryGroup]) -> list[RolloutException]:
    """The exceptions that ended rollouts."""
    errors: list[RolloutException] = []
    for group in groups:
        errors += [*group.exceptions, *(each.exception for each in group if each.exception is not None)]
    return errors


def failure_kinds(errors: Iterable[RolloutException]) -> tuple[FailureKind, ...]:
    """The exceptions counted by kind, the commonest first."""
    return merged(
        FailureKind(
            error.type, " ".join(error.message.split())[:LONG_MESSAGE], _place(error), traceback=_own_traceback(error)
        )
        for error in errors
    )


def merged(kinds: Iterable[FailureKind]) -> tuple[FailureKind, ...]:
    """Kinds that are alike as one, the commonest first."""
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
    """The summary with longer messages, and below it a traceback of each kind."""
    tracebacks = [kind.traceback for kind in kinds[:LONG_KINDS] if kind.traceback]
    return "\n".join([summary(kinds, LONG_KINDS, LONG_MESSAGE), *tracebacks])


def _is_own(file: str) -> bool:
    """Whether a file is the app's, and no library's."""
    if file.startswith(("<", *LIBRARIES)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _place(error: RolloutException) -> str:
    """The innermost line of the app in a traceback; empty where there is none, or where it would not help."""
    if error.type in OUR_OWN:
        return ""
    frames = [frame for frame in _FRAME.finditer(error.traceback) if _is_own(frame["file"])]
    return f"{Path(frames[-1]['file']).name}:{frames[-1]['line']}" if frames else ""


def _own_traceback(error: RolloutException) -> str:
    """The traceback with the app's frames, or the last frame where none is the app's; empty for errors of ours."""
    lines = error.traceback.splitlines()
    frames = {at: frame for at, line in enumerate(lines) if (frame := _FRAME.match(line))}
    if not frames or error.type == "RolloutError":
        return ""
    own = {at for at, frame in frames.items() if _is_own(frame["file"])} or {max(frames)}
    kept: list[str] = []
    indent, shown = None, True
    for at, line in enumerate(lines):
        if at in frames:
            indent, shown = frames[at]["indent"], at in own
        elif indent is None or not line.startswith((f"{indent}  ", f"{indent}[Previous line")):
            indent, shown = None, True  # below the frames: the exception's own lines
        if shown:
            kept.append(line)
    return "\n".join(line[:LONG_MESSAGE] for line in kept[-TRACEBACK_LINES:])
