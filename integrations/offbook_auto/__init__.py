"""Trains a model from a description of its task, or in the place of the model that an app calls."""

from .described import AutoTrainer

__all__ = ["AutoTrainer"]
