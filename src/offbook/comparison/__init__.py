"""Compares trained steps and other LLMs as the model of the same app on the same scenarios."""
