"""Rollouts on the machines of a Ray cluster."""

from .ray_runner import RayRunner

__all__ = ["RayRunner"]
