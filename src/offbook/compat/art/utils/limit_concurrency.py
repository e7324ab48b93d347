"""Stands for `art.utils.limit_concurrency`."""

from ....client.retry import limit_concurrency

__all__ = ["limit_concurrency"]
