"""Scenarios for a server's tools: generation, validation by execution, splits and files."""
