"""The one place that prints. Texts of users, models and servers cannot control the terminal through it, and no stdout can
end a run: not its encoding, not a closed pipe, not a full disk."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import IO, Any

from .text import encodable, printable

logger = logging.getLogger("offbook")
_unwritten: list[str] = []
"""Why output was lost, once. Empty for a reader that went away, as `head` does: it has what it wanted."""


class Output:
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


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    r"""Print a text with its control and format characters escaped, on stdout or with `err` on stderr, and flush.

    >>> echo("a name \x1b[2J")
    a name \x1b[2J
    """
    output = Output(sys.stderr if err else sys.stdout)
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
