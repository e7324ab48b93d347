"""Stands for `art.local`."""

from ...client.local import LocalBackend

__all__ = ["LocalBackend"]
