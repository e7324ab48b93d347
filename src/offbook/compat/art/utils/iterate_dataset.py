"""Stands for `art.utils.iterate_dataset`."""

from offbook.client.rollouts.dataset import DatasetBatch, iterate_dataset

__all__ = ["DatasetBatch", "iterate_dataset"]
