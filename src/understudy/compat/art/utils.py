"""Stands for `art.utils`."""

from ...client.dataset import iterate_dataset
from ...client.retry import limit_concurrency, retry

__all__ = ["iterate_dataset", "limit_concurrency", "retry"]
