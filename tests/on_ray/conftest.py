"""The scripted nvidia-smi of the sampler's tests, and the model of the trainer's."""

from tests.server.sampler.conftest import driver
from tests.trainer.conftest import model

__all__ = ["driver", "model"]
