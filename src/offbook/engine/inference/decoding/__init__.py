"""Continuous batching: the scheduler, the batches that it decodes, and the model."""
