"""Machines and storage of cloud providers: a server on a machine that SkyPilot launches, and copies of its checkpoints."""

from .skypilot import SkyPilotBackend

__all__ = ["SkyPilotBackend"]
