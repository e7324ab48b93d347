"""Stands for `art.utils`, with its submodules."""

from ..modules import names_in
from .iterate_dataset import iterate_dataset
from .limit_concurrency import limit_concurrency
from .retry import retry
from .strip_logprobs import strip_logprobs

__all__ = ["iterate_dataset", "limit_concurrency", "retry", "strip_logprobs"]

__getattr__ = names_in(__name__)
