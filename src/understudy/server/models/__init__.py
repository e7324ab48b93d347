"""Registered models, their checkpoints, and the base model."""
