"""Understudy trains a small open model to play the LLM's part in the agent you already have."""

__version__ = "0.1.0"
