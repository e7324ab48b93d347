"""Continuous batching: the scheduler, the batch it decodes, and the model."""
