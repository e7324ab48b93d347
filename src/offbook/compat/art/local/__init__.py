"""Stands for `art.local`."""

from ....client.local import LocalBackend
from ..modules import names_in

__all__ = ["LocalBackend"]

__getattr__ = names_in(__name__)
