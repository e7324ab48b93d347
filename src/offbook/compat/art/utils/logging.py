"""Stands for `art.utils.logging`: lines for people in a notebook."""

from __future__ import annotations

from offbook.base.terminal import echo


def info(msg: object) -> None:
    """Print a line with the mark INFO."""
    echo(f"INFO  {msg}")


def step(msg: object) -> None:
    """Print a line with the mark STEP."""
    echo(f"STEP  {msg}")


def ok(msg: object) -> None:
    """Print a line with the mark OK."""
    echo(f"OK    {msg}")


def warn(msg: object) -> None:
    """Print a line with the mark WARN."""
    echo(f"WARN  {msg}")


def err(msg: object) -> None:
    """Print a line with the mark ERR."""
    echo(f"ERR   {msg}")


def dim(msg: object) -> None:
    """Print a line without a mark."""
    echo(str(msg))
