"""Converts a server's tools for the model: schemas, results, and calls from rollouts."""
