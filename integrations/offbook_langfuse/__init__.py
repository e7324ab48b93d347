"""Scenarios, datasets and prompts from Langfuse. The sink that shows rollouts there is in `offbook_sinks`."""

from .connection import LangfuseConnection
from .stored import ManagedPrompt, dataset_scenarios, managed_prompt, save_dataset
from .trace_scenarios import scenarios_from_traces

__all__ = [
    "LangfuseConnection",
    "ManagedPrompt",
    "dataset_scenarios",
    "managed_prompt",
    "save_dataset",
    "scenarios_from_traces",
]
