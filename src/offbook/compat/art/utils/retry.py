"""Stands for `art.utils.retry`."""

from ....client.retry import retry

__all__ = ["retry"]
