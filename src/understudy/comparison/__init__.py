"""Comparisons: the same app on the same scenarios, answered by trained steps and by other LLMs."""
