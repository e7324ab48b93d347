"""Stands for `art.utils.iterate_dataset`."""

from ....client.dataset import DatasetBatch, iterate_dataset

__all__ = ["DatasetBatch", "iterate_dataset"]
