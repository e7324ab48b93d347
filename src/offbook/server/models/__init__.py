"""Registered models, their checkpoints and adapters, and the base model."""
