"""The one place that prints. Texts of users, models and servers cannot control the terminal through it, and no stdout can
end a run: not its encoding, not a closed pipe, not a full disk."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from .text import encodable, printable

logger = logging.getLogger("offbook")
_unwritten: list[str] = []
"""Why output was lost, once. Empty for a reader that went away, as `head` does: it has what it wanted."""


class _Output:
    """A text stream that takes every text and never raises. Its other attributes are the stream's."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what the stream's encoding can express; other characters are replaced or escaped."""
        return self._tried(lambda stream: stream.write(encodable(text, getattr(stream, "encoding", None)))) or len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._tried(lambda stream: stream.flush())

    def _tried(self, action: Callable[[IO[str]], int | None]) -> int | None:
        try:
            return action(self._stream) if self._stream is not None else None  # None: it was closed before the start
        except BrokenPipeError:
            return None
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not _unwritten:
                _unwritten.append(str(error))
                logger.warning("output could not be written: %s", error)
            return None


class Terminal(Console):
    r"""A rich console that escapes control and format characters of all texts, also in tables and live displays.

    >>> import io
    >>> file = io.StringIO()
    >>> Terminal(file=file).print("a name \x1b[2J", markup=False)
    >>> file.getvalue()
    'a name \\x1b[2J\n'
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable. Rich's own control codes are segments of their own kind and stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))

    @property
    def file(self) -> IO[str]:
        """The stream, as one that never raises."""
        return cast(IO[str], _Output(super().file))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


_ANY_WIDTH = 10_000


def measured(table: Table, console: Console) -> Measurement:
    """The widths in which no word of a table is cut, and in which each row is one line."""
    return Measurement.get(console, console.options.update_width(_ANY_WIDTH), table)


def fitting(
    table_of: Callable[[Sequence[str]], Table], columns: Sequence[str], give_way: Sequence[str], console: Console
) -> Table:
    """The table of as many columns as the console has room for. Those of `give_way` are left out, the first one first."""
    shown = list(columns)
    for name in give_way:
        if name in shown and measured(table_of(shown), console).maximum > console.width:
            shown.remove(name)
    return table_of(shown)


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    r"""Print a text with its control and format characters escaped, on stdout or with `err` on stderr, and flush.

    >>> echo("a name \x1b[2J")
    a name \x1b[2J
    """
    output = _Output(sys.stderr if err else sys.stdout)
    output.write(printable(text) + ("\n" if nl else ""))
    output.flush()


def end_output() -> str | None:
    """Flush stdout before the process ends. Returns why output was lost; None if none was, or nobody reads it any more.

    Python would flush it again, and print a traceback if that fails: then stdout becomes the null device."""
    try:
        sys.stdout.flush()
    except AttributeError:  # None: it was closed before the start
        return None
    except (OSError, ValueError) as error:
        if not isinstance(error, BrokenPipeError):
            _unwritten.append(str(error))
        if isinstance(error, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _unwritten[0] if _unwritten else None
