"""Stands for `art.utils.iterate_dataset`."""

from ....client.dataset import iterate_dataset

__all__ = ["iterate_dataset"]
