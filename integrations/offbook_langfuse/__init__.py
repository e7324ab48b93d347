"""Langfuse for Offbook: see rollouts there, and bring scenarios, datasets and prompts from there."""

from .connection import LangfuseConnection
from .datasets import dataset_scenarios, save_dataset
from .prompts import ManagedPrompt, managed_prompt
from .sink import LangfuseSink
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
