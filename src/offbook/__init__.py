"""Offbook trains a small open model to play the LLM's part in the agent you already have."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .base.config import LoraOptions, SFTConfig, TeacherKL, TrainConfig
    from .base.errors import OffbookError
    from .base.server_options import EngineOptions
    from .base.types import (
        History,
        Scenario,
        TrainResult,
        Trajectory,
        TrajectoryGroup,
    )
    from .client.backend import RemoteBackend
    from .client.local import LocalBackend
    from .client.model import Model, TrainableModel
    from .client.rollouts.capture import (
        auto_trajectory,
        capture_auto_trajectory,
        current_trajectory,
        log_metric,
        log_reward,
        outside,
    )
    from .client.rollouts.dataset import iterate_dataset
    from .client.rollouts.gather import gather_trajectories, gather_trajectory_groups, trajectory_group_batches
    from .contracts import TraceSink
    from .processes.command import Command
    from .rewards.reward_result import RewardResult
    from .rewards.rubric import write_rubric
    from .rewards.ruler_judge import Ruler, ruler, ruler_score_group
    from .trainer.trainer import Trainer

__all__ = [
    "Command",
    "EngineOptions",
    "History",
    "LocalBackend",
    "LoraOptions",
    "Model",
    "OffbookError",
    "RemoteBackend",
    "RewardResult",
    "Ruler",
    "SFTConfig",
    "Scenario",
    "TeacherKL",
    "TraceSink",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture_auto_trajectory",
    "current_trajectory",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "log_metric",
    "log_reward",
    "outside",
    "ruler",
    "ruler_score_group",
    "trajectory_group_batches",
    "write_rubric",
]

_MODULE_OF = {
    "Command": "processes.command",
    "EngineOptions": "base.server_options",
    "History": "base.types",
    "LocalBackend": "client.local",
    "LoraOptions": "base.config",
    "Model": "client.model",
    "OffbookError": "base.errors",
    "RemoteBackend": "client.backend",
    "RewardResult": "rewards.reward_result",
    "Ruler": "rewards.ruler_judge",
    "SFTConfig": "base.config",
    "Scenario": "base.types",
    "TeacherKL": "base.config",
    "TraceSink": "contracts",
    "TrainConfig": "base.config",
    "TrainResult": "base.types",
    "TrainableModel": "client.model",
    "Trainer": "trainer.trainer",
    "Trajectory": "base.types",
    "TrajectoryGroup": "base.types",
    "auto_trajectory": "client.rollouts.capture",
    "capture_auto_trajectory": "client.rollouts.capture",
    "current_trajectory": "client.rollouts.capture",
    "gather_trajectories": "client.rollouts.gather",
    "gather_trajectory_groups": "client.rollouts.gather",
    "iterate_dataset": "client.rollouts.dataset",
    "log_metric": "client.rollouts.capture",
    "log_reward": "client.rollouts.capture",
    "outside": "client.rollouts.capture",
    "ruler": "rewards.ruler_judge",
    "ruler_score_group": "rewards.ruler_judge",
    "trajectory_group_batches": "client.rollouts.gather",
    "write_rubric": "rewards.rubric",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:  # `from offbook import plugins` asks here before it imports
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
