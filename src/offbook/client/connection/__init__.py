"""Speaks HTTP to a server: requests, the stream of a training step, downloads."""
