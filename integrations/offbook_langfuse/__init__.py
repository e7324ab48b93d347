"""Langfuse: the sink that shows rollouts there; scenarios, datasets and prompts from it."""

from .connection import LangfuseConnection
from .sink import LangfuseSink
from .stored import ManagedPrompt, dataset_scenarios, managed_prompt, save_dataset
from .trace_scenarios import scenarios_from_traces

__all__ = [
    "LangfuseConnection",
    "LangfuseSink",
    "ManagedPrompt",
    "dataset_scenarios",
    "managed_prompt",
    "save_dataset",
    "scenarios_from_traces",
]
