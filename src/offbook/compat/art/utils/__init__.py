"""Stands for `art.utils`."""

from offbook.client.rollouts.dataset import DatasetBatch, iterate_dataset

from ..modules import names_in
from .retry import limit_concurrency, retry
from .strip_logprobs import strip_logprobs

__all__ = ["DatasetBatch", "iterate_dataset", "limit_concurrency", "retry", "strip_logprobs"]

__getattr__ = names_in(__name__)
