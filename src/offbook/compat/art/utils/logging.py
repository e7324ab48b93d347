"""Stands for `art.utils.logging`: lines for people in a notebook."""

from __future__ import annotations


def info(msg: object) -> None:
    """Print a line with the mark INFO."""
    print(f"INFO  {msg}")


def step(msg: object) -> None:
    """Print a line with the mark STEP."""
    print(f"STEP  {msg}")


def ok(msg: object) -> None:
    """Print a line with the mark OK."""
    print(f"OK    {msg}")


def warn(msg: object) -> None:
    """Print a line with the mark WARN."""
    print(f"WARN  {msg}")


def err(msg: object) -> None:
    """Print a line with the mark ERR."""
    print(f"ERR   {msg}")


def dim(msg: object) -> None:
    """Print a line without a mark."""
    print(msg)
