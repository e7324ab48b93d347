"""Scenarios and datasets from Langfuse. The sink that shows rollouts there is in `offbook_sinks`."""

from .connection import LangfuseConnection
from .stored import dataset_scenarios, save_dataset
from .trace_scenarios import scenarios_from_traces

__all__ = [
    "LangfuseConnection",
    "dataset_scenarios",
    "save_dataset",
    "scenarios_from_traces",
]
