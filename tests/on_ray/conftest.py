"""The model of the trainer's tests."""

from tests.trainer.conftest import model

__all__ = ["model"]
