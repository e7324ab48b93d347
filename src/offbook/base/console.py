"""rich's console as this project uses it. Apart from `terminal`, so that what only prints lines does not import rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from .terminal import Output
from .text import printable


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
        return cast(IO[str], Output(super().file))

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
